"""The limits of what a user gives: messages, JSON and YAML, kinds of files."""

import os

import pytest
import runs  # noqa: F401  adds data/ to sys.path

import json_yaml
from errors import DataError, presentable, unexpected
from port import reading

FIX = "\n  fix: correct it"


@pytest.mark.parametrize("text, shown", [
    ("x: is missing", "x: is missing"), ("a\0b\x1b[2J\r\x7f\x85\t\u00e9\ud83d", r"a\x00b\x1b[2J\r\x7f\x85" + "\t\u00e9" + r"\ud83d"),
    ("x" * 9_000_000, "x" * 512 + " ... (8,999,016 characters) ... " + "x" * 472),
    ("line\n" * 1_000_000, None), (("y" * 1500 + "\n") * 9, None)])
def test_a_message_is_limited_and_keeps_its_fix(text, shown):
    found = str(DataError(text, "correct it"))
    assert found == presentable(found) and len(found) <= 4096 and found.endswith(FIX)
    assert shown in (None, found.removesuffix(FIX))


BOMB = "a0: &a0 [x, x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}, *a{i}]\n" for i in range(5))


@pytest.mark.parametrize("name, text, message", [
    # a scalar that YAML cannot read, and documents that it does not accept
    ("f.yaml", "a: 1\nb: 2024-99-99\n", "line 2, column 4 of f.yaml: broken YAML: month must be in 1..12"),
    ("f.yaml", "a: " + "1" * 5000, "line 1, column 4 of f.yaml: broken YAML: Exceeds the limit"),
    ("f.yaml", "a: 1:" + ":".join(["59"] * 200), "f.yaml has an integer of more than 1024 bits"), ("f.yaml", "a: !!timestamp soon", "line 1, column 4 of f.yaml: broken YAML: "),
    ("f.yaml", "a: !!int ''", "line 1, column 4 of f.yaml: broken YAML: "), ("f.yaml", "a: !!float x", "line 1, column 4 of f.yaml: broken YAML: "),
    ("f.yaml", "a: !!bool maybe", "line 1, column 4 of f.yaml: broken YAML: "), ("f.yaml", "a: !!python/name:os.system", "broken YAML: could not determine a constructor"),
    ("f.yaml", "a: 1\n---\nb: 2", "but found another document"), ("f.yaml", "a:\n\tb: 1", "line 2, column 1 of f.yaml: broken YAML: found character '\\t'"),
    ("f.yaml", "a: &x 1\nb: &x 2", "line 2, column 4 of f.yaml: broken YAML: second occurrence"), ("f.yaml", "a: *b", "found undefined alias 'b'"),
    ("f.yaml", "a: \0", "broken YAML: special characters are not allowed"), ("f.yaml", "? [a]\n: 1", "found unhashable key"),
    ("f.yaml", "a: 1\na: 2", "f.yaml has 'a' twice"), ("f.yaml", "- a", "f.yaml does not contain keys"), ("f.yaml", "", "f.yaml does not contain keys"),
    # aliases that multiply, and depth
    ("f.yaml", BOMB, "f.yaml has more than 200 values, of which an alias repeats those of its anchor"),
    ("f.yaml", "a: &a {x: 1, y: 2}\n" + BOMB.replace("[", "{<<: [").replace("]", "]}").replace("&a0 {<<: [x, x, x]}", "&a0 {<<: [*a, *a, *a]}"), "has more than 200 values"),
    ("f.yaml", "a: &a [*a]", "f.yaml is nested more than 9 deep"), ("f.yaml", "a: " + "[" * 9 + "]" * 9, "f.yaml is nested more than 9 deep"),
    ("f.yaml", "a: " + "[" * 90 + "]" * 90, "f.yaml is nested more than 9 deep"),
    ("f.yaml", "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(9)), "f.yaml is nested more than 9 deep"),
    # JSON
    ("f.json", '{"a": ' * 10 + "1" + "}" * 10, "f.json is nested more than 9 deep"), ("f.json", "[" * 5000, "f.json is nested more than 9 deep"),
    ("f.json", '{"a": NaN}', "f.json is not valid JSON: NaN is not a number of JSON"), ("f.json", '{"a": ' + "1" * 5000 + "}", "f.json is not valid JSON: Exceeds the limit"),
    ("f.json", '{"a": ' + "1" * 400 + "}", "f.json has an integer of more than 1024 bits"), ("f.json", '{"a": 1, "a": 2}', "f.json has 'a' twice"),
    ("f.json", '{"a": 1}' + " " * 6000, "f.json has 6,008 bytes, more than the 6,000 that are read"), ("f.json", "[1]", "f.json does not contain keys"), ("f.json", "", "f.json is not valid JSON"),
    ("f.json", b'{"a": "\xff"}', "cannot read f.json: it is not UTF-8 text (byte 7)")])
def test_files_of_settings(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    for limit, value in {"BYTES": {"JSON": 6000, "YAML": 6000}, "VALUES": 200, "DEPTH": 9}.items():
        monkeypatch.setattr(json_yaml, limit, value)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as error:
        json_yaml.read_object(name)
    assert message in str(error.value) and "\n  fix: " in str(error.value)


@pytest.mark.parametrize("make, message", [
    (lambda path: os.mkfifo(path), "f.json is not a regular file"), (lambda path: path.mkdir(), "f.json is not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "f.json is not a regular file"), (lambda path: path.symlink_to(path), "cannot read f.json: Too many levels of symbolic links"),
    (lambda path: None, "cannot read f.json: No such file or directory")])
def test_what_is_not_a_file(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "f.json")
    with pytest.raises(DataError) as error:
        json_yaml.read_object("f.json")
    assert message in str(error.value)


def test_aliases_and_merge_keys_are_read(tmp_path):
    (tmp_path / "f.yaml").write_text("\ufeffa: &a {b: 1, date: 2024-01-01}\nc: {<<: *a, b: 2}\nd: [*a, *a]\n")
    found = json_yaml.read_object(tmp_path / "f.yaml")
    assert found["c"]["b"] == 2 and found["d"] == [found["a"]] * 2


def test_a_file_has_few_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_SETTINGS", 3)
    (tmp_path / "f.json").write_text('{"a": 1, "b": {"c": 2, "d": [3, 4]}, "e": null}')
    assert len(reading.read_file(str(tmp_path / "f.json"))) == 3
    (tmp_path / "f.json").write_text('{"a": 1, "b": {"c": 2, "d": [3, 4]}, "e": 5}')
    with pytest.raises(DataError, match="f.json has 4 settings, more than the 3 that are read"):
        reading.read_file(str(tmp_path / "f.json"))


def test_an_unforeseen_error_is_one_message():
    with pytest.raises(ZeroDivisionError) as error:
        1 / 0
    assert unexpected(error.value).startswith("ZeroDivisionError: division by zero (test_limits.py, line ") and "\n  fix: this is an error of the program" in unexpected(error.value)
