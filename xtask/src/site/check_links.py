"""Checks that every link in the HTML pages of a site leads to an existing file of the site, and to an existing fragment of that
file.

    python3 check_links.py FOLDER IGNORED-FOLDER...

Links to other sites are not checked. Pages may link to pages in ignored folders, whose own links are not checked.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Iterator, Optional
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the fragments (element ids) of an HTML page.

    >>> page = Page('<h1 id="top">A</h1> href="no" <a href="b.html#c"><img src="../p.svg"></a>')
    >>> page.links, page.fragments
    (['b.html#c', '../p.svg'], {'top'})
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fragments: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _: str, attributes: list[tuple[str, Optional[str]]]) -> None:
        for name, value in attributes:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name == "id":
                self.fragments.add(value)


@cache
def read(file: Path) -> Page:
    return Page(file.read_text() if file.suffix == ".html" else "")


def broken(site: Path, file: Path) -> Iterator[str]:
    """Yields a message for each broken link of an HTML page.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     site = Path(name).resolve()
    ...     links = ["b.html#here", "b.html#gone", "gone.html", "../x.html", "/b.html", "https://example.org"]
    ...     _ = (site / "a.html").write_text("".join(f'<a href="{link}">' for link in links))
    ...     _ = (site / "b.html").write_text('<p id="here">')
    ...     list(broken(site, site / "a.html"))
    ['b.html#gone', 'gone.html', '../x.html', '/b.html']
    """
    for link in read(file).links:
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        fragment = unquote(parts.fragment)
        if not target.is_file() or site not in target.parents or (fragment and fragment not in read(target).fragments):
            yield link


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    ignored = [site / name for name in sys.argv[2:]]
    pages = [page for page in sorted(site.rglob("*.html")) if not any(folder in page.parents for folder in ignored)]
    found = [f"{page.relative_to(site)}: `{link}` is a broken link" for page in pages for link in broken(site, page)]
    print(*found, f"{len(pages)} pages", sep="\n")
    sys.exit(1 if found or not pages else 0)


if __name__ == "__main__":
    main()
