"""Write docs/settings.md from the descriptions of the settings: python tools/settings_page.py"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from sparsesam.lab.commands.parser import default_text, metavar
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Made from the program by `python tools/settings_page.py`. On the command line a setting is an option with hyphens,
`--batch-size 32`; in YAML files a key with underscores, `batch_size: 32`.
An option that the run does not use is refused.
"""


def page() -> str:
    lines = [HEAD.rstrip()]
    for kind in (TrainConfig, RunEnvironment):
        types = typing.get_type_hints(kind)
        for setting in dataclasses.fields(kind):
            about = setting.metadata
            if about["group"] is not None:
                heading = f"\n## {about['group'].capitalize()}\n\n| setting | values | meaning |\n|---|---|---|"
                lines.append(heading)
            used = f" *Used with {about['used'].words}.*" if about["used"] else ""
            meaning = f"{about['help']}{default_text(setting.default)}{used}".replace("|", "\\|")
            values = metavar("--", types[setting.name]).strip("{}").replace(",", ", ").replace("|", " or ")
            lines.append(f"| `{setting.name}` | {values} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
