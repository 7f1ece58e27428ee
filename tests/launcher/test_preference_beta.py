from pathlib import Path

from towline.jobs.experiment import IteratedDpoExperiment
from towline.jobs.load_experiment import load_experiment
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.preference_beta import beta_warnings

SHIPPED = Path(__file__).parents[2] / "jobs" / "experiments" / "tiny-iterated-dpo.toml"


def test_rounds_of_dpo_have_the_usual_range_too() -> None:
    file = ExperimentFile(path=SHIPPED, text=SHIPPED.read_text(), overrides=("trainer.beta=2.0",))
    experiment = load_experiment(SHIPPED, ("trainer.beta=2.0",))
    assert isinstance(experiment, IteratedDpoExperiment)
    (warning,) = beta_warnings(file, experiment)
    assert warning.startswith("-o: trainer.beta = 2 is outside 0.05 to 0.5: so large a beta")
    usual = experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update={"beta": 0.1})})
    assert list(beta_warnings(file, usual)) == []
