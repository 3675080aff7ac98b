"""What mkdocs cannot know: pages may link to files of the repository that are not pages.

The site has no copy of them, so such a link becomes its text. One to a file that is not there stays, and
`mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = Path(page.file.abs_src_path).parent

    def unlinked(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).exists() else link[0]

    return _OUT_OF_DOCS.sub(unlinked, markdown)
