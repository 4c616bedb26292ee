"""`dev/install.py`: uv does what pip would do with its settings, or pip does it."""

from __future__ import annotations

import install

LISTED = """\
:env:.extra-index-url='https://env/simple'
:env:.disable-pip-version-check='1'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='\\n/wheels'
install.index-url='https://mirror/simple?a=b'
download.index-url='https://other/simple'
"""


def test_the_settings_of_pip_become_those_of_uv() -> None:
    made = install.for_uv(install.settings(LISTED))
    assert made is not None
    options, variables = made
    assert options[options.index("--default-index") + 1] == "https://mirror/simple?a=b"
    assert options.count("--index") == 1
    assert options[options.index("--index") + 1] == "https://env/simple", "the environment goes first"
    assert options[options.index("--find-links") + 1] == "/wheels"
    assert options[options.index("--constraint") + 1] == "/etc/constraints.txt"
    assert variables == {"SSL_CERT_FILE": "/etc/ca.crt"}


def test_a_setting_without_a_counterpart_is_left_to_pip() -> None:
    assert install.for_uv({"client-cert": "me.pem"}) is None
