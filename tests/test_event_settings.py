"""What events are by themselves: their signatures, and the settings that say where they go."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from django.test import override_settings

from dedupjobs import conf, envelope, routes
from dedupjobs.exceptions import SignatureError

OLD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NOW = 1_614_265_330.0


# ---- signatures


def test_signature_is_that_of_the_specification() -> None:
    text = '{"test": 2432232314}'
    headers = envelope.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", text, now=NOW, secrets=[OLD])
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"


def verify(headers: dict[str, str], *, text: str = "{}", now: float = NOW, **more: Any) -> str:
    return envelope.verify(
        headers, text.encode(), now=now, **{"secrets": [NEW, OLD], "tolerance": 300, **more}
    )


def signed(text: str = "{}", *, secrets: Any = (OLD,), now: float = NOW) -> dict[str, str]:
    return envelope.headers("a", text, now=now, secrets=secrets)


def test_either_of_two_secrets_will_do_while_one_follows_the_other() -> None:
    assert verify(signed(secrets=[OLD])) == "a"
    assert verify(signed(secrets=[NEW])) == "a"
    assert verify(signed(secrets=[NEW, OLD]), secrets=[OLD]) == "a"


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"webhook-signature": ""}, {}, "are needed"),
        ({"webhook-id": "b"}, {}, "No secret"),
        ({"webhook-timestamp": "1614265331"}, {}, "No secret"),
        ({"webhook-signature": "v1,AAAA"}, {}, "No secret"),
        ({"webhook-signature": "v1,\udcff é"}, {}, "No secret"),
        ({"webhook-timestamp": "yesterday"}, {}, "not within 300 s"),
        ({"webhook-timestamp": "9" * 4000}, {}, "not within 300 s"),
        ({"webhook-timestamp": "¹"}, {}, "not within 300 s"),
        ({}, {"now": NOW + 301}, "not within 300 s"),
        ({}, {"now": NOW - 301}, "not within 300 s"),
        ({}, {"secrets": [NEW]}, "No secret"),
        ({}, {"secrets": []}, "No secret"),
        ({}, {"text": "{ }"}, "No secret"),
    ],
)
def test_message_that_was_changed_or_is_old_is_refused(
    change: dict[str, str], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(SignatureError, match=words) as caught:
        verify({**signed(), **change}, **more)
    assert "v1," not in str(caught.value)


# ---- settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "must be a dict"),
        ({"TARGET": {}}, "Did you mean 'TARGETS'?"),
        ({"TARGETS": []}, "it must be a dict"),
        ({"TARGETS": {"a b": {"signal": True}}}, "the name 'a b' must be"),
        ({"TARGETS": {"a": {"streem": "x"}}}, "is not an option. Did you mean 'stream'?"),
        ({"TARGETS": {"a": {}}}, "none of stream, webhook, call, signal"),
        ({"TARGETS": {"a": {"stream": "x", "call": "y"}}}, "says stream, call"),
        ({"TARGETS": {"a": {"stream": "x", "maxlen": 0}}}, "at least 1"),
        ({"TARGETS": {"a": {"stream": "x", "on_dead": "die"}}}, "wait, go_on"),
        ({"TARGETS": {"a": {"stream": "x", "cache": "c", "url": "redis://"}}}, "both"),
        ({"TARGETS": {"a": {"stream": "x", "url": "nope"}}}, "the address of a Redis"),
        ({"TARGETS": {"a": {"stream": "x", "url": "http://h:6379/0"}}}, "the address of a Redis"),
        ({"TARGETS": {"a": {"stream": "x", "url": "redis://h:port"}}}, "the address of a Redis"),
        ({"TARGETS": {"a": {"webhook": "http://x.example/", "secrets": [NEW]}}}, "not encrypted"),
        ({"TARGETS": {"a": {"webhook": "ftp://x.example/", "secrets": [NEW]}}}, "https address"),
        ({"TARGETS": {"a": {"webhook": "https://x.example/"}}}, "has no secrets"),
        ({"TARGETS": {"a": {"signal": True, "secrets": [NEW]}}}, "which only a webhook uses"),
        ({"ROUTES": {"order.*": "a"}}, "which TARGETS lacks"),
        ({"TARGETS": {"a": {"signal": True}}, "ROUTES": {"Order": "a"}}, "give a name such as"),
        ({"TARGETS": {"a": {"signal": True}}, "ROUTES": {"*": 7}}, "a list of names"),
        ({"RETAIN": 0}, "from 1 to a year"),
    ],
)
def test_outbox_setting_that_can_not_be_meant_is_named_with_its_cure(
    given: Any, words: str
) -> None:
    with override_settings(DEDUPJOBS={"OUTBOX": given}):
        assert words in next(conf.problems())


@pytest.mark.parametrize("secret", ["short", "whsec_%%%", "whsec_c2hvcnQ=", 7])
def test_secret_that_is_none_is_refused_and_not_shown(secret: Any) -> None:
    one = {"webhook": "https://x.example/", "secrets": [secret]}
    words = list(routes.outbox_problems({"TARGETS": {"a": one}}, "OUTBOX"))
    assert "'secrets' is no list of secrets" in words[0]
    assert str(secret) not in words[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"CONSUMERS": {"a": {}}}, "neither whose 'stream'"),
        ({"CONSUMERS": {"a": {"stream": 7}}}, "name the Redis stream"),
        ({"CONSUMERS": {"a": {"stream": "x", "url": 7}}}, "the address of a Redis"),
        ({"CONSUMER": {}}, "Did you mean 'CONSUMERS'?"),
    ],
)
def test_inbox_setting_that_can_not_be_meant_is_named_with_its_cure(given: Any, words: str) -> None:
    with override_settings(DEDUPJOBS={"INBOX": given}):
        assert words in next(conf.problems())


def test_marks_that_go_before_the_events_do_are_warned_of() -> None:
    given = {
        "OUTBOX": {"TARGETS": {"a": {"stream": "a"}}},
        "INBOX": {"CONSUMERS": {"a": {"stream": "a"}}, "RETAIN": 60},
    }
    with override_settings(DEDUPJOBS=given):
        [(text, _)] = conf.contradictions()
    assert "an event that is sent again would be applied again" in text
