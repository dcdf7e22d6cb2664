"""Chips by name, and the devices that a user may ask for."""

import pytest

from holdfast.errors import UserError
from holdfast.execution.chips import CHIPS, find_chip, num_devices, parse_devices


def test_an_unknown_chip_is_an_error_that_lists_all() -> None:
    with pytest.raises(UserError, match=r"--chip tpu-v9: unknown chip; there are .*tpu-v5e.*h100"):
        find_chip("tpu-v9")


@pytest.mark.parametrize(
    ("chip", "text", "wanted"),
    [
        ("tpu-v5e", "8", "a torus such as 2x4"),
        ("tpu-v5e", "2x2x2", "a torus such as 2x4"),
        ("tpu-v5p", "2x4", "a torus such as 2x2x2"),
        ("tpu-v5e", "2xfour", "a torus such as 2x4"),
        ("tpu-v5e", "0x4", "a torus such as 2x4"),
        ("h100", "2x4", "a number of GPUs"),
        ("h100", "-1", "a number of GPUs"),
        ("h100", "", "a number of GPUs"),
    ],
)
def test_devices_that_a_chip_does_not_come_in(chip: str, text: str, wanted: str) -> None:
    with pytest.raises(UserError, match=f"--devices {text}: expected {wanted}"):
        parse_devices(CHIPS[chip], text)


def test_a_v4_chip_is_two_devices() -> None:
    assert num_devices(CHIPS["tpu-v4"], (2, 2, 2)) == 16
    assert num_devices(CHIPS["tpu-v5p"], (2, 2, 2)) == 8
    assert num_devices(CHIPS["h100"], (64,)) == 64


def test_a_ring_over_more_gpus_than_a_host_has_is_as_fast_as_the_network() -> None:
    h100 = CHIPS["h100"]
    assert h100.ring_bandwidth(8) == h100.link > h100.ring_bandwidth(16) == h100.network > 0
    assert CHIPS["tpu-v5e"].ring_bandwidth(256) == CHIPS["tpu-v5e"].link


def test_a_slice_that_is_not_made_is_refused_before_the_compiler_ends_the_process() -> None:
    with pytest.raises(UserError, match=r"--devices 32x32: .* at most 16x16"):
        parse_devices(CHIPS["tpu-v5e"], "32x32")
    assert parse_devices(CHIPS["tpu-v5e"], "16x16") == (16, 16)
    assert parse_devices(CHIPS["tpu-v5p"], "8x8x32") == (8, 8, 32)
