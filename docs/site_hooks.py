"""SECURITY.md is outside of docs/, where the code host expects it. On the site it is the page reporting.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    policy = Path(config.docs_dir).with_name("SECURITY.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "reporting.md", content=policy.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../SECURITY.md)", "](reporting.md)")
