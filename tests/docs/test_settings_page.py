from tools import settings_page


def test_page_is_made_from_the_settings_of_this_version():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python tools/settings_page.py"
