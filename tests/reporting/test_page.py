"""Self-contained HTML pages."""

import base64
import re
import zlib

from plotly.offline import get_plotlyjs

from twofold.reporting.page import html_page


def test_a_page_contains_its_chart_library_compressed():
    page = html_page("A & B", ["<p>text</p>"])
    assert "<h1>A &amp; B</h1>\n<p>text</p>" in page
    assert len(page) < 1_900_000
    packed = re.search(r'<script type="text/plain" id="plotly" data-bytes="(\d+)">([^/]*)</script>', page)
    gzip = base64.b85decode(packed[2])[: int(packed[1])]
    assert zlib.decompress(gzip, wbits=31).decode() == get_plotlyjs()
