"""The commands of the pages that need no service run in a short form, page by page."""

import pytest

from support.documented import ROOT
from support.page_commands import RUNNABLE, PageRun, needs_services

PATHS = [path for path, statements in RUNNABLE.items() if not needs_services(statements)]


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PATHS])
def test_the_commands_of_a_page_run(path, environment, model, shared, tmp_path):
    with PageRun(model, tmp_path, environment, shared) as page:
        page.run_all(RUNNABLE[path])
