"""The manifests in deploy/ against the published schemas of Kubernetes and Kubeflow, and against each other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.launch.engines import task_from
from tests.support.groups import ROOT

yaml = pytest.importorskip("yaml", reason="pip install '.[deploy]' brings PyYAML and the schemas")
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*/*.yaml"))


def objects_in(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kubernetes_takes_them(path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install '.[deploy]' brings Kubernetes' schemas")
    for each in objects_in(path):
        if each["kind"] == "Kustomization":  # of kubectl itself, without a published schema
            assert each["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
            assert all((path.parent / name).is_file() for name in each["resources"])
        else:
            schemas.validate(each, "1.31", strict=True)


@pytest.mark.parametrize(
    ("name", "model"),
    [("runtime", "TrainerV1alpha1ClusterTrainingRuntime"), ("trainjob", "TrainerV1alpha1TrainJob")],
)
def test_kubeflow_trainer_takes_them(name: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install '.[deploy]' brings its models")
    (given,) = objects_in(DEPLOY / "kubeflow" / f"{name}.yaml")
    assert getattr(models, model).from_dict(given).to_dict() == given  # which leaves out what it does not know


def test_kubeflows_training_operator_takes_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("kubeflow.training.models", reason="pip install '.[deploy]' brings its models")
    client = pytest.importorskip("kubernetes.client")
    for name in dir(theirs):
        monkeypatch.setattr(client.models, name, getattr(theirs, name), raising=False)
    (given,) = objects_in(DEPLOY / "kubeflow" / "paddlejob.yaml")
    api = client.ApiClient()
    read = api.deserialize(SimpleNamespace(data=json.dumps(given)), "KubeflowOrgV1PaddleJob")
    assert api.sanitize_for_serialization(read) == given


@pytest.mark.parametrize("name", ["ring/job.yaml", "ps/trainers.yaml"])
def test_counts_that_belong_together_agree(name: str) -> None:
    job = objects_in(DEPLOY / "kubernetes" / name)[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    told = {each["name"]: each.get("value", "") for each in container["env"]}
    task = task_from({**told, "JOB_COMPLETION_INDEX": "1"})
    assert task is not None
    assert job["completions"] == job["parallelism"] == task.count
    if "GRADSYNC_SERVERS" in told:
        servers = next(o for o in objects_in(DEPLOY / "kubernetes/ps/servers.yaml") if o["kind"] == "StatefulSet")
        args = servers["spec"]["template"]["spec"]["containers"][0]["args"]
        assert f"--nranks={task.count}" in args
        assert f"--shard=$(POD_INDEX)/{servers['spec']['replicas']}" in args
        assert len(told["GRADSYNC_SERVERS"].split(",")) == servers["spec"]["replicas"]
