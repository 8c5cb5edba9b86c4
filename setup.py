"""Package mapping only: models/, kernels/ and eval/ stand at the top and are imported as visspec.<name>."""

import warnings

from setuptools import find_packages, setup

FOLDERS = ("models", "kernels", "eval")
WEIGHTS = [  # of models/zoo: those of the demo and the README, and their drafters; the repository has the others
    *("captioner", "vispec", "captioner-emoji", "vispec-emoji"),
    *("painter", "painter-eagle", "painter-emoji", "painter-emoji-eagle"),
    "smollm2-context",
]

# an editable install warns that ./visspec comes first where the repository is the working folder; it may, see __init__
warnings.filterwarnings("ignore", message="Editable installation")

setup(
    packages=find_packages(include=["visspec", "visspec.*"])
    + [f"visspec.{name}" for name in FOLDERS]
    + [f"visspec.{name}.{sub}" for name in FOLDERS for sub in find_packages(name)],
    package_dir={"visspec": "visspec", **{f"visspec.{name}": name for name in FOLDERS}},
    include_package_data=False,  # package_data names all of it; setuptools would take data folders for lost packages
    package_data={
        "visspec.models.zoo": [f"{name}/*" for name in WEIGHTS],
        "visspec.eval.bench": ["prompts.jsonl"],
        "visspec.eval.report": ["templates/*"],
        "visspec.toys": ["heldout/*/*"],
        "visspec.toys.world.emoji": ["atlas.*", "OFL.txt"],
    },
)
