"""The log of a command: lines that say time, rank, phase, event and values; bounded progress."""

from __future__ import annotations

from engine.cli.console import Journal


class Lines(list):
    """A stream that keeps what is written."""

    def write(self, text):
        self.append(text)

    def flush(self):
        return


def test_a_log_line_says_time_rank_phase_event_and_values():
    lines = Lines()
    journal = Journal(2, lines, clock=lambda: 0.0)
    journal.enter("Plan cache", budget_mib=12, why="two words", share=0.5)
    assert lines == [
        '1970-01-01T00:00:00Z rank=2 phase="Plan cache" begins budget_mib=12 why="two words" '
        "share=0.5\n"
    ]


def test_progress_off_a_terminal_is_a_line_now_and_then_and_one_at_the_end():
    now, lines = [0.0], Lines()
    journal = Journal(0, lines, clock=lambda: now[0])
    for done in range(101):
        now[0] = done * 0.1
        journal.progress("load", done, 100)
    journal.progress("load", 100, 100)
    percents = [line.split("percent=")[1].strip() for line in lines]
    assert percents == ["0", "50", "100"]
