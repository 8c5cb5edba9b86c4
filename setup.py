"""Package mapping only: models/, kernels/ and eval/ stand at the top and are imported as visspec.<name>."""

from setuptools import find_packages, setup

FOLDERS = ("models", "kernels", "eval")

setup(
    packages=find_packages(include=["visspec", "visspec.*"])
    + [f"visspec.{name}" for name in FOLDERS]
    + [f"visspec.{name}.{sub}" for name in FOLDERS for sub in find_packages(name)],
    package_dir={"visspec": "visspec", **{f"visspec.{name}": name for name in FOLDERS}},
    package_data={
        "visspec.models.zoo": ["*/*", "*/*/*"],
        "visspec.eval": ["assets/*", "templates/*"],
    },
)
