"""The matrix of faults: kills, cut links, torn files, wrong messages, strangers, hostile bytes: which test shows it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLE", "Fault"]

HERE, SECOND_USER = "tests/faults", "tests/processes/test_second_user.py"


@dataclass(frozen=True)
class Fault:
    """
    Args:
        ps, collective: FILE::TEST of tests/faults, or from the checkout's root; the part of its cases whose name holds
            the scheme's, if there is one. "": there is no such case; `why` says so.
    """

    row: int
    case: str
    ps: str
    collective: str
    why: str = ""


def both(row: int, case: str, test: str) -> Fault:
    return Fault(row, case, test, test)


FROZEN, CUT, COMMITS = "test_frozen.py", "test_cut_launchers.py", "test_commits.py"
RANKS, SIMULATED = "test_numpy_ranks.py", "test_simulations.py"
FOLDER = "tests/unit/common/commit/test_folder.py"
KILLS, LEFT, ADOPTED = "test_kills.py", "test_leftovers.py", "test_adoption.py"
PROGRAM, BESIDE = "test_program_messages.py", "test_messages_beside.py"
MESSAGES, FLIPS = "test_messages.py", "test_flips.py"
TABLE = [
    both(
        1,
        "a rank, at every point of a step and of a commit",
        f"{KILLS}::test_a_rank_is_killed_and_the_bits_are_the_same",
    ),
    both(
        1,
        "in a program of one's own, with a TrainingState",
        "test_own_programs.py::test_a_program_of_ones_own_survives_a_kill",
    ),
    both(
        1,
        "without restarts: all others name it, a server too",
        "test_named_kills.py::test_all_others_name_who_was_killed",
    ),
    both(
        2,
        "a server, or the rank where all met, at every point",
        f"{KILLS}::test_the_server_or_rank_0_is_killed_and_the_bits_are_the_same",
    ),
    both(
        2,
        "any process, at any moment, 2 and 4 ranks, by seeds",
        "test_any_moment.py::test_a_process_is_killed_at_any_moment",
    ),
    both(
        2,
        "likewise in a job of two hosts",
        "test_any_moment.py::test_a_process_of_two_hosts_is_killed_at_any_moment",
    ),
    both(
        2,
        "without restarts, NumPy ranks: within a second, by all",
        f"{RANKS}::test_who_is_killed_is_named_within_a_second",
    ),
    both(3, "a second kill during recovery, 20 seeds", "test_second_kills.py::test_a_second_kill_during_recovery"),
    both(
        3, "a second kill where one restart is allowed", "test_second_kills.py::test_a_second_kill_that_is_one_too_many"
    ),
    both(4, "any process frozen, and woken in time", f"{FROZEN}::test_for_less_than_the_timeout_nothing_is_lost"),
    both(4, "for longer, without restarts: all others name it", f"{FROZEN}::test_for_longer_all_others_name_it"),
    both(
        4,
        "for longer: another takes its place",
        f"{FROZEN}::test_for_longer_another_takes_its_place_and_the_bits_are_the_same",
    ),
    both(
        4,
        "likewise, NumPy ranks: in the timeout and a second",
        f"{RANKS}::test_who_is_frozen_is_named_within_the_timeout_and_a_second",
    ),
    both(4, "woken in a later epoch", f"{FROZEN}::test_who_wakes_up_in_a_later_epoch_is_refused"),
    both(5, "a link cut, both ways and one: for a moment, for good", f"{RANKS}::test_a_link_is_cut"),
    both(5, "between launchers that meet again", f"{CUT}::test_launchers_that_meet_again_go_on_in_one_epoch"),
    both(5, "between launchers that do not", f"{CUT}::test_launchers_that_do_not_meet_again_say_so_and_leave_nothing"),
    both(6, "packets lost, twice, behind later ones", f"{RANKS}::test_a_link_is_bad"),
    Fault(
        7,
        "a message lost, twice, late, overtaken, of an old epoch",
        f"{MESSAGES}::test_at_servers",
        f"{MESSAGES}::test_in_a_ring",
    ),
    Fault(
        7,
        "likewise who joins, or what is answered",
        f"{MESSAGES}::test_joining_a_server",
        f"{MESSAGES}::test_meeting_of_a_ring",
    ),
    Fault(
        7,
        "likewise of a program of one's own: its optimizer, its state",
        f"{PROGRAM}::test_a_program_at_servers",
        "",
        "ranks have their optimizer themselves",
    ),
    Fault(
        7,
        "likewise who pulls parameters, in the mode async",
        f"{PROGRAM}::test_parameters_are_pulled",
        "",
        "it is a mode of servers",
    ),
    Fault(
        7,
        "likewise a sign of life",
        f"{BESIDE}::test_a_sign_of_life",
        "",
        "ranks give it by their connections' own words",
    ),
    Fault(
        7,
        "likewise of messages between trainers",
        f"{BESIDE}::test_of_messages_between_trainers",
        "",
        "ranks say it to each other",
    ),
    Fault(
        7,
        "likewise that the group has failed",
        f"{BESIDE}::test_that_the_group_has_failed",
        "",
        "ranks say it to each other",
    ),
    Fault(
        7,
        "likewise who asks a server",
        f"{MESSAGES}::test_who_asks_a_server_disturbs_nobody",
        "",
        "there is nobody to be asked",
    ),
    both(
        7,
        "with restarts: the job ends with the bits of the undisturbed run",
        "test_mended_messages.py::test_a_job_whose_message_went_wrong_is_mended",
    ),
    both(7, "one that is not as it was sent, NumPy ranks", f"{RANKS}::test_a_message_does_not_come_as_it_was_sent"),
    both(8, "flips between hosts, with and without TLS", f"{RANKS}::test_bits_flip_between_hosts"),
    Fault(
        8,
        "1,000 flipped bits, and one of each byte of a header",
        f"{FLIPS}::test_between_a_server_and_a_trainer_over_tcp",
        f"{FLIPS}::test_between_ranks",
    ),
    Fault(
        8,
        "likewise, over gRPC without TLS",
        f"{FLIPS}::test_over_grpc_without_tls",
        "",
        "a ring sends no data over gRPC",
    ),
    both(9, "a commit torn at every 512 bytes", f"{FOLDER}::test_torn_at_any_512_bytes_the_commit_before_is_found"),
    both(9, "a bit of it flipped", f"{FOLDER}::test_a_flipped_bit_anywhere_is_found"),
    both(
        9,
        "a training that comes back to torn, flipped, missing files",
        f"{COMMITS}::test_a_training_goes_back_to_the_newest_whole_commit",
    ),
    both(9, "where no commit is whole", f"{COMMITS}::test_where_no_commit_is_whole_that_is_said"),
    both(9, "a full disk", f"{COMMITS}::test_a_full_disk_is_said_and_what_was_written_before_serves"),
    both(10, "wrong nranks", "test_meeting.py::test_wrong_nranks"),
    both(10, "a rank that comes twice", "test_meeting.py::test_a_rank_that_comes_twice"),
    both(10, "a rank out of range", "test_meeting.py::test_a_rank_out_of_range"),
    both(10, "a missing rank, where a launcher knows", "test_meeting.py::test_a_missing_rank_that_a_launcher_knows_of"),
    both(10, "a missing rank, where none does", "test_meeting.py::test_a_missing_rank_without_a_launcher"),
    both(11, "another shape, dtype, name or order", "test_layouts.py::test_another_layout"),
    both(11, "a gradient that is not finite", "test_bad_gradients.py::test_a_gradient_that_is_not_finite"),
    Fault(
        11,
        "likewise: what a server has stays as it was",
        "test_bad_gradients.py::test_it_changes_nothing_of_a_server",
        "",
        "there is no server",
    ),
    both(12, "another version", "test_meeting.py::test_another_version"),
    both(12, "another optimizer, rate or model", "test_meeting.py::test_another_configuration"),
    both(12, "another mode or backend", "test_meeting.py::test_another_mode_or_backend"),
    Fault(
        13,
        "what is too large, or a million tensors, of a member without a seat",
        "test_sizes.py::test_a_member_without_a_seat_is_refused_and_the_training_goes_on",
        "",
        "a ring's ports close when it has met",
    ),
    Fault(
        13,
        "a length that cannot be, of a member",
        "test_sizes.py::test_a_trainer_that_announces_too_much_ends_the_training_by_name",
        "test_sizes.py::test_a_rank_that_announces_too_much_is_named_and_left",
    ),
    Fault(
        13,
        "a byte that nobody can decode, of a member without a seat",
        "test_one_byte.py::test_at_servers",
        "test_one_byte.py::test_where_ranks_meet",
    ),
    both(13, "10,000 fuzzed frames for each parser", "test_sizes.py::test_ten_thousand_fuzzed_frames"),
    both(14, "wrong or no credentials, what was overheard", "test_strangers.py::test_every_port_refuses_a_stranger"),
    both(14, "other hosts without credentials", "test_strangers.py::test_other_hosts_are_not_listened_to_without"),
    Fault(
        14,
        "another user of the host, at the rendezvous",
        f"{SECOND_USER}::test_a_trainer_of_another_user_goes_over_tcp_unless_it_must_not",
        f"{SECOND_USER}::test_another_user_who_reads_the_name_of_the_rendezvous_is_no_member",
    ),
    Fault(
        14,
        "another user of the host, at the memory",
        f"{SECOND_USER}::test_another_user_neither_hands_in_nor_gets_anything",
        f"{SECOND_USER}::test_another_user_is_no_rank_of_a_ring_in_shared_memory",
    ),
    both(15, "a pickle from another rank", "test_pickles.py::test_an_object_of_another_rank"),
    both(15, "a pickle for a data set", "test_pickles.py::test_a_data_set"),
    both(16, "500 connections", "test_crowds.py::test_five_hundred_strangers"),
    both(16, "slow and half-open ones", "test_crowds.py::test_who_is_slow_or_stops_half_way_is_dropped_in_time"),
    both(17, "a port in use", "test_taken_ports.py::test_a_port_in_use"),
    both(18, "kill -9 of the launcher", f"{LEFT}::test_the_launcher_is_killed"),
    both(
        18,
        "the same, with --adopt-for; then of a rank",
        f"{ADOPTED}::test_a_job_outlives_its_launcher_and_a_rank_that_is_killed_is_replaced",
    ),
    both(
        18,
        "the same, and no launcher comes",
        f"{ADOPTED}::test_a_job_that_no_launcher_comes_for_is_ended_and_nothing_is_left",
    ),
    both(
        18,
        "the same; the next is told to end",
        f"{ADOPTED}::test_a_launcher_that_took_a_job_over_ends_it_when_told_to",
    ),
    both(
        18,
        "the same; a rank dies, without restarts",
        f"{ADOPTED}::test_a_rank_that_died_without_a_launcher_is_told_of_by_the_next",
    ),
    both(18, "kill -9 of all processes", f"{LEFT}::test_all_processes_are_killed_at_once"),
    both(18, "the same, with restarts", f"{LEFT}::test_all_processes_are_killed_at_once_and_started_again"),
    both(
        18,
        "kill -9 of launcher and guard; the next start",
        f"{LEFT}::test_the_guard_is_killed_too_and_the_next_start_clears_away_what_is_nobodys",
    ),
    both(
        21,
        "10,000 random schedules: of servers; of a ring and its recovery",
        f"{SIMULATED}::test_seeds_of_a_simulation",
    ),
]
