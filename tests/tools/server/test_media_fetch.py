"""Tests of fetching files from allowed hosts: which URLs are fetched, and which addresses are reached."""

from __future__ import annotations

import re
import socket
import threading
from typing import Any

import pytest

from vkbackend.errors import InvalidArgument
from vkbackend.tools.server import media_fetch
from vkbackend.tools.server.media_fetch import checked, checked_hosts, fetch, is_remote, resolved

pytestmark = pytest.mark.no_vulkan

ALLOWED = ("images.example.com",)


def test_an_https_url_of_an_allowed_host() -> None:
    assert checked("url", "https://images.example.com/a/b.png?x=1#y", ALLOWED) == (ALLOWED[0], "/a/b.png?x=1")
    assert checked("url", "HTTPS://Images.Example.COM:443", ALLOWED) == (ALLOWED[0], "/")
    assert is_remote("HTTP://a") and is_remote("https://a") and not is_remote("data:,") and not is_remote(3)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a.png",
        "https://other.example.com/a.png",
        "https://images.example.com.evil.net/a.png",
        "https://x.images.example.com/a.png",
        "https://images.example.com:8443/a.png",
        "https://user@images.example.com/a.png",
        "https://images.example.com@evil.net/a.png",
        "https://evil.net\\@images.example.com/a.png",
        "https://images.example.com/a\r\nhost: evil.net",
        "https://images.example.com/a b",
        "https://images.example.com:x/",
        "https://[::1]/",
        "https://169.254.169.254/latest",
        "https://images.example.com/" + "a" * 3000,
    ],
)
def test_other_urls_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the name was resolved"))
    with pytest.raises(InvalidArgument, match="not an https URL of an allowed host"):
        fetch("url", url, ALLOWED)


def addresses(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 443)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "fc00::1",
    ],
)
def test_addresses_that_are_not_global_are_not_reached(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "93.184.215.14", address)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a connection was made"))
    with pytest.raises(InvalidArgument, match="an address that is not global") as refusal:
        fetch("url", "https://images.example.com/a.png", ALLOWED)
    assert address not in str(refusal.value)


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "93.184.215.14")
    assert resolved(ALLOWED[0]) == "93.184.215.14"
    asked: list[Any] = []

    def connect(to: Any, timeout: float) -> socket.socket:
        asked.append(to)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(InvalidArgument, match=re.escape("images.example.com was not read: refused")):
        fetch("url", "https://images.example.com/a.png", ALLOWED)
    assert asked == [("93.184.215.14", 443)]


def answer(head: str, body: bytes) -> bytes:
    ours, theirs = socket.socketpair()

    def respond() -> None:
        with theirs:
            theirs.recv(4096)
            theirs.sendall(head.encode() + b"\r\n\r\n" + body)

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        with ours:
            return media_fetch._get(ours, "images.example.com", "/a.png")  # type: ignore[arg-type]
    finally:
        thread.join()


def test_a_response_is_limited_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer("HTTP/1.1 200 OK\r\ncontent-length: 3", b"abc") == b"abc"
    with pytest.raises(ValueError, match="status 302"):
        answer("HTTP/1.1 302 Found\r\nlocation: https://10.0.0.1/", b"")
    monkeypatch.setattr(media_fetch, "IMAGE_LIMITS", type(media_fetch.IMAGE_LIMITS)(n_bytes=2))
    with pytest.raises(ValueError, match="more than"):
        answer("HTTP/1.1 200 OK\r\ncontent-length: 3", b"abc")


@pytest.mark.parametrize("name", ["*", "*.example.com", "10.0.0.1", "localhost", "a..b/", "", "exa mple.com"])
def test_a_host_is_a_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match="--allowed-media-host"):
        checked_hosts([name])


def test_names_of_hosts_have_no_case() -> None:
    assert checked_hosts(["Images.Example.com"]) == ALLOWED
