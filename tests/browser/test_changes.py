"""What the page shows and does when the fleet changes: keys, controls, drains, deaths, silence."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from cli.fleet import Fleet
from gateway.admission.api_keys import hash_key
from tests.browser.browser import Browser, Watched
from tests.browser.traffic import running_fleet_for_pages, send
from tests.http_client import HTTP
from tests.integration.fleets import wait_for

ADMIN, VIEWER = "baton-admin-key-of-the-tests", "baton-viewer-key-of-the-tests"
ADMINS = {"authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def fleet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet whose operators have keys."""
    folder = tmp_path_factory.mktemp("keys")
    admins, viewers = folder / "admins", folder / "viewers"
    admins.write_text(f"{hash_key(ADMIN)}  # ops-2\n")
    viewers.write_text(f"{hash_key(VIEWER)}\n")
    with running_fleet_for_pages(
        BATON_ADMIN_KEY_FILE=str(admins), BATON_VIEWER_KEY_FILE=str(viewers)
    ) as made:
        send(made, 8)
        yield made


@pytest.fixture
def pages(browser: Browser, fleet: Fleet) -> Iterator[Watched]:
    made = Watched(browser, fleet.url, ADMIN)
    yield made
    made.assert_clean()


def summary(fleet: Fleet) -> dict:
    return HTTP.get(f"{fleet.url}/fleet", headers=ADMINS).raise_for_status().json()


def state_of(fleet: Fleet, worker_id: str) -> str:
    found = {each["worker_id"]: each["state"] for each in summary(fleet)["workers"]}
    return found.get(worker_id, "gone")


def log_of(fleet: Fleet) -> list[dict]:
    return HTTP.get(f"{fleet.url}/control/log", headers=ADMINS).raise_for_status().json()


def confirm(page: Page, button: str, verb: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name=verb, exact=True).click()
    expect(dialog).to_have_count(0)


def test_the_page_asks_for_its_key_once_and_keeps_it_for_the_tab(
    browser: Browser, fleet: Fleet
) -> None:
    watched = Watched(browser, fleet.url)
    with watched.page("fleet") as page:
        expect(page.locator("main h1")).to_have_text("This needs a key")
        page.get_by_label("Viewer's or admin key").fill(VIEWER)
        page.get_by_role("button", name="Unlock").click()
        expect(page.locator(".verdict")).to_be_attached()
        page.reload()
        expect(page.locator(".verdict")).to_be_attached()
        assert VIEWER not in page.url
        page.evaluate("location.hash = '#/controls'")
        expect(page.locator("main h1")).to_have_text("Controls need an admin key")
        page.get_by_label("Admin key").fill(ADMIN)
        page.get_by_role("button", name="Unlock").click()
        expect(page.locator(".page-h")).to_contain_text("ops-2")
    refused = [each for each in watched.complaints if "401" not in each]
    assert refused == []


def test_a_target_changes_live_and_is_logged(pages: Watched, fleet: Fleet) -> None:
    with pages.page("controls") as page:
        page.locator("#s-ttft_target_ms-router").fill("1500")
        confirm(page, "Change ttft_target_ms router", "Change")
        row = page.locator(".audit tbody tr").first
        expect(row).to_contain_text("ttft_target_ms (router) 1,000 → 1,500")
        expect(row).to_contain_text("ops-2")
        page.evaluate("location.hash = '#/fleet'")
        expect(page.locator(".strip")).to_contain_text("target 1.50\u00a0s")
    assert summary(fleet)["targets"]["ttft_target_ms"] == 1500


def test_a_chunk_budget_reaches_the_workers_of_its_role(pages: Watched, fleet: Fleet) -> None:
    with pages.page("controls") as page:
        field = page.get_by_label("Prefill chunk budget prefill")
        expect(field).to_have_value("64")
        field.fill("128")
        confirm(page, "Change chunk_max_tokens prefill", "Change")
        row = page.locator(".audit tbody tr").first
        expect(row).to_contain_text("chunk_max_tokens (prefill) 64 → 128")
        expect(row).to_contain_text("on 2 of 2 workers")

    def budgets() -> dict[str, int]:
        answer = HTTP.get(f"{fleet.url}/control/settings", headers=ADMINS).raise_for_status()
        settings = [each for each in answer.json() if each["name"] == "chunk_max_tokens"]
        return {each["scope"]: each["value"] for each in settings}

    wait_for("new leases", lambda: budgets() == {"prefill": 128, "decode": 64})
    long = {"model": "demo_model", "prompt": list(range(7, 207)), "max_tokens": 1}
    answer = HTTP.post(f"{fleet.url}/v1/completions", json=long).raise_for_status()
    trace = f"{fleet.url}/requests/{answer.headers['x-baton-request-id']}/trace"

    def chunks() -> list[list[int]] | None:
        shown = HTTP.get(trace, headers=ADMINS).raise_for_status().json()
        prefill = shown["attempts"][-1]["prefill"]
        return prefill["chunks"] if prefill else None

    assert max(tokens for _, _, tokens in wait_for("its chunks", chunks)) == 128


def test_a_cancelled_question_changes_nothing(pages: Watched, fleet: Fleet) -> None:
    before = len(log_of(fleet))
    with pages.page("controls") as page:
        page.get_by_role("button", name="Drain decode-1", exact=True).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("predicted")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
    assert len(log_of(fleet)) == before
    wait_for("a worker that does not drain", lambda: state_of(fleet, "decode-1") == "ready")


def test_a_test_prompt_travels(pages: Watched, fleet: Fleet) -> None:
    with pages.page("controls") as page:
        page.get_by_label("Prompt", exact=True).fill("what is a lambda? " * 20)
        page.get_by_label("prefill", exact=True).select_option("prefill-2")
        page.get_by_label("decode", exact=True).select_option("decode-2")
        confirm(page, "Send", "Send")
        expect(page.locator(".hops")).to_contain_text("first token after")
        page.get_by_role("link", name="Where every millisecond went").click()
        expect(page.locator(".title h1")).to_have_text(re.compile("^test-"))
        expect(page.locator(".title .tag")).to_have_text("finished")
        for worker in ("prefill-2", "decode-2"):  # a transfer that took no time has no row
            expect(page.locator("table.stages")).to_contain_text(worker)
    entry = log_of(fleet)[0]
    assert (entry["action"], entry["key"]) == ("test prompt", "ops-2")
    assert "lambda" not in json.dumps(entry)


def test_a_drain_from_the_page_drains(pages: Watched, fleet: Fleet) -> None:
    with pages.page("controls") as page:
        confirm(page, "Drain prefill-2", "Drain prefill-2")
        wait_for("the drain", lambda: state_of(fleet, "prefill-2") in ("draining", "lost", "gone"))
        assert fleet.processes["prefill-2"].wait(60.0)
        assert fleet.processes["prefill-2"].exit_status() == 0, "it ended in order"
        expect(page.locator(".audit tbody tr").first).to_contain_text("drain prefill-2")
    send(fleet, 2)


def test_a_killed_worker_shows_as_lost(pages: Watched, fleet: Fleet) -> None:
    """And in no other state on the way than as a worker without a connection."""
    with pages.page("fleet") as page:
        card = page.locator('[data-worker="decode-2"]')
        expect(card.locator(".state")).to_have_text("ready")
        page.evaluate(
            """() => {
                window.states = [];
                const state = '[data-worker="decode-2"] .state';
                new MutationObserver(() => {
                    const text = document.querySelector(state)?.textContent;
                    if (text && text !== window.states.at(-1)) window.states.push(text);
                }).observe(document.body, { subtree: true, childList: true, characterData: true });
            }"""
        )
        fleet.processes["decode-2"].signal(signal.SIGKILL)
        expect(card.locator(".state")).to_have_text("lost")
        expect(card).to_contain_text("Since")
        old = re.compile(r"ready, report .* old")  # on a machine that is busy
        states = [each for each in page.evaluate("window.states") if not old.fullmatch(each)]
        assert [each for each in states if each != "ready"] in (["not connected", "lost"], ["lost"])
        expect(page.locator(".events")).to_contain_text("decode-2")
    send(fleet, 2)


def test_a_silent_router_leaves_the_numbers_and_says_how_old_they_are(
    browser: Browser, fleet: Fleet
) -> None:
    watched = Watched(browser, fleet.url, ADMIN)
    with watched.page("fleet") as page:
        expect(page.locator("#live")).to_contain_text("live")
        fleet.processes["router"].signal(signal.SIGSTOP)
        try:
            expect(page.locator(".banner")).to_contain_text("No data for")
            expect(page.locator(".gone .verdict")).to_be_attached()
            expect(page.locator("#live")).to_contain_text("no data for")
        finally:
            fleet.processes["router"].signal(signal.SIGCONT)
        expect(page.locator(".banner")).to_have_count(0)
        expect(page.locator("#live")).to_contain_text("live")
        expect(page.locator(".gone")).to_have_count(0)  # the page has its colours back
