"""Pages that MkDocs makes from the registry: the home page from the README, one per technique."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from kvsim.report.evidence import describe_technique_rows
from kvsim.report.lists import techniques
from kvsim.techniques.released import ENGINES


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    readme = Path(config.config_file_path).parent / "README.md"
    home = readme.read_text(encoding="utf-8").replace("](docs/", "](")
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = (readme.parent / f"{name}.md").read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
        home = home.replace(f"]({name}.md)", f"]({name.lower()}.md)")
    files.append(File.generated(config, "index.md", content=home))
    rows = techniques()
    lines = [f"- [{row['name']}]({row['name']}.md): {row['summary']}" for row in rows]
    index = "# Techniques\n\n" + "\n".join(lines) + "\n"
    files.append(File.generated(config, "techniques/index.md", content=index))
    for row in rows:
        place = f"techniques/{row['name']}.md"
        files.append(File.generated(config, place, content=page(row)))
    list_pages(files, config.nav)
    return files


def list_pages(files: Files, nav: list[Any]) -> None:
    """Add a folder's pages to the section of the navigation that has the folder's index."""
    for section in nav:
        for pages in section.values():
            for index in [page for page in pages if page.endswith("/index.md")]:
                folder = index.removesuffix("index.md")
                found = sorted(f.src_uri for f in files if f.src_uri.startswith(folder))
                pages += [page for page in found if page != index]


def page(row: dict[str, Any]) -> str:
    """What it is, its settings, which engines have it, and what was measured."""
    name = row["name"]
    engines = [engine for engine, some in ENGINES.items() if name in some]
    kind = "Lossless" if row["lossless"] else "Lossy with its default settings"
    parts = [f"# {name}", row["summary"], f"{kind}: see [quality](../quality.md)."]
    if row["assumes"]:
        parts.append(f"Its speed assumes {row['assumes']}.")
    if row["parameters"]:
        head = ["| setting | default | meaning |", "|---|---|---|"]
        lines = [f"| `{p['name']}` | {p['default']} | {p['meaning']} |" for p in row["parameters"]]
        parts.append("## Settings\n\n" + "\n".join([*head, *lines]))
    parts.append("## Engines\n\n" + (", ".join(engines) or "No serving engine has it."))
    parts.append("## Evidence\n\n" + describe_technique_rows(name))
    command = (
        f"kvsim predict --model llama3.1-8b --gpu a100-80g --technique full,{name} --batch 8 "
        f"--prompt 1k,8k,64k"
    )
    parts.append(f"## When does it win?\n\n```text\n{command}\n```")
    parts.append(f"## Source\n\n{row['source'] or 'The baseline.'}")
    return "\n\n".join(parts) + "\n"
