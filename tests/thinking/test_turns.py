"""What is played on consecutive blocks, forward and back: every backward finds what it needs, and no more waits than `every` allows."""

from hypothesis import given
from hypothesis import strategies as st

from longshift.schedule.unit_events import backward_turns, forward_turns

LAYERS = 12
EVERY = st.integers(0, LAYERS + 1)


def play(turns, waiting, finished):
    """`waiting`: by unit what lies before it, "x", or "kept" with what a backward takes. Returns the most that were kept and waited."""
    most_kept = most_waiting = 0
    for unit, turn in turns:
        match turn:
            case "embed":
                waiting[1] = "x"
            case "pass on":
                del waiting[unit]
                waiting[unit + 1] = "x"
            case "pass":
                assert waiting[unit] == "x"
                waiting[unit + 1] = "x"
            case "forward":
                assert waiting[unit] == "x"
                waiting |= {unit: "kept", unit + 1: "x"}
            case "loss":
                assert waiting.pop(unit) == "x"
                finished.append(unit)
            case "backward":
                assert waiting.pop(unit) == "kept"
                finished.append(unit)
            case "backward from x":
                assert waiting.pop(unit) == "x"
                finished.append(unit)
            case "embed_back":
                finished.append(unit)
            case _:
                raise AssertionError(turn)
        most_kept = max(most_kept, sum(what == "kept" for what in waiting.values()))
        most_waiting = max(most_waiting, len(waiting))
    return most_kept, most_waiting


@given(st.integers(1, LAYERS), EVERY)
def test_a_whole_model(layers, every):
    units, waiting, finished = range(layers + 2), {}, []
    kept, _ = play(forward_turns(units, layers, every), waiting, finished)
    groups = -(-layers // every) if every else 1
    assert not finished
    assert kept == layers - (groups - 1) * every
    assert list(waiting.values()).count("x") == groups - 1 + 1  # before every group that was passed, and the head's
    kept, most = play(backward_turns(units, layers, every), waiting, finished)
    assert finished == list(reversed(units))
    assert not waiting
    if every:
        assert kept <= every
        assert most <= groups + every


@given(st.integers(0, LAYERS), st.integers(0, LAYERS), EVERY)
def test_a_part_of_it(first, count, every):
    """What comes from another stage lies before its first unit; the last one's output is given away."""
    units = range(first, min(first + count, LAYERS + 1) + 1)
    waiting, finished = ({} if first == 0 else {first: "x"}), []
    play(forward_turns(units, LAYERS, every), waiting, finished)
    if units[-1] <= LAYERS:
        assert waiting.pop(units[-1] + 1) == "x"
    play(backward_turns(units, LAYERS, every), waiting, finished)
    assert finished == list(reversed(units))
    assert not waiting
