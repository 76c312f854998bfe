"""Long statements on several lines, so that a difference between two of them can be read. Only white space changes."""

from __future__ import annotations

import re

_CLAUSES = (
    "SELECT|WITH|INSERT INTO|DELETE FROM|FROM|USING|WHERE|GROUP BY|HAVING|ORDER BY|UNION ALL|EXCEPT|ON CONFLICT|RETURNING"
    "|(?:LEFT |RIGHT |FULL |CROSS )?JOIN"
)
_STRING = r"""'(?:[^']|'')*'|"(?:[^"]|"")*\""""
_SHORT = r"""\((?=SELECT )(?:[^()'"]|\([^()'"]*\)){1,40}\)"""
_TOKEN = re.compile(rf"{_STRING}|{_SHORT}|IS (?:NOT )?DISTINCT FROM|(?<!\w)(?P<clause>{_CLAUSES})(?!\w)|[()]")
_QUERY = re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE)\b")


def sql_layout(text: str) -> str:
    """The statement with a line for each clause, and subqueries indented."""
    lines = [""]
    blocks: list[bool] = []  # for every open parenthesis: whether it encloses a query
    end = 0

    def append(part: str) -> None:
        lines[-1] += part if lines[-1].strip() else part.lstrip()

    def start_line() -> None:
        if lines[-1].strip():
            lines.append("  " * sum(blocks))
        else:
            lines[-1] = "  " * sum(blocks)

    for match in _TOKEN.finditer(text):
        append(text[end : match.start()])
        end = match.end()
        if match[0] == "(":
            append("(")
            blocks.append(_QUERY.match(text, end) is not None)
            if blocks[-1]:
                start_line()
        elif match[0] == ")":
            if blocks.pop():
                start_line()
            append(")")
        else:
            if match["clause"] and all(blocks[-1:]):  # not FROM in extract(year FROM …)
                start_line()
            append(match[0])
    append(text[end:])
    laid_out = "\n".join(line.rstrip() for line in lines)
    assert "".join(laid_out.split()) == "".join(text.split())
    return laid_out
