from towline.launcher.pending_reasons import REASONS, reason_text


def test_a_known_reason_says_what_it_means_and_what_to_do() -> None:
    assert reason_text("JobHeldUser", "12") == "JobHeldUser: you hold it. To do: scontrol release 12"
    assert reason_text("None", "12") == "None: the scheduler has not looked at it yet"


def test_a_limit_that_is_not_in_the_table_is_told_by_its_family() -> None:
    assert reason_text("QOSMaxSomethingNewPerUser", "12").startswith(
        "QOSMaxSomethingNewPerUser: a limit of the qos is reached. To do: "
    )
    assert "down, drained" in reason_text("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "12")


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    assert reason_text("MoonInTheWrongPhase", "12") == "MoonInTheWrongPhase"


def test_no_text_ends_with_a_full_stop_of_its_own() -> None:
    assert not [name for name, reason in REASONS.items() if reason.means.endswith(".") or reason.todo.endswith(".")]
