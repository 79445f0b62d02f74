"""The page itself: template, style, scripts and data in one HTML text that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

_ASSETS = files("megatron_gmc.report") / "assets"
_SCRIPTS = ("page.js", "charts.js", "trajectories.js")


def render(title: str, data: Mapping[str, object]) -> str:
    """The HTML page of `data`.

    Values are escaped twice over: the template escapes what it prints, the data lie in a block
    that the browser does not run, and the scripts write text nodes alone. The page's content
    security policy lets no script run but its own, by their hashes, and no address be loaded.
    """
    scripts = [_library(), *(_asset(name) for name in _SCRIPTS)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_asset("page.html"))
    return template.render(
        title=title,
        policy=_policy(scripts),
        style=Markup(_asset("page.css")),
        data=Markup(embedded_json(data)),
        scripts=[Markup(script) for script in scripts],
    )


def embedded_json(data: object) -> str:
    """JSON that stands in an HTML script block: nothing in it can end the block or open a tag.

    Raises ValueError for NaN and infinities, which are no JSON.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(scripts: list[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and vega-embed (BSD-3-Clause), as vl-convert bundles them: 0.9 MB."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in bundle.lower() and "<!--" not in bundle, "would end the script block"
    return bundle
