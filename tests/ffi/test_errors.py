"""What goes wrong comes back as an error that names the argument, the expectation and the value."""

import re
from typing import Any

import jax
import numpy as np
import plans
import pytest
from recording import RecordingDriver, provider

from jax_megamoe.launch import launcher
from jax_megamoe.runtime import extension

KEY = "test/errors"
BASE = 1 << 40

FILL, LAUNCH = "steps.0", "steps.1"
SYMMETRIC, ACTS, WEIGHTS, FACTORS = (f"{LAUNCH}.arguments.{index}" for index in (4, 5, 6, 9))


def attributes(symbol: str, num_ranks: int = 1) -> dict[str, Any]:
    """Those of whole_plan; its operands are x, w and the table."""
    plan = plans.whole_plan(num_ranks, symbol)
    return launcher.encode(plan, ["x", "w", "table"], ["y"], buffer_key=KEY)


def run(attributes: dict[str, Any], target: str = extension.TARGET) -> None:
    """Compiles and runs a call with these attributes."""
    arrays = [*plans.operands().values(), np.frombuffer(plans.TABLE, np.uint8)]
    call = jax.ffi.ffi_call(target, plans.RESULTS["y"])
    jax.block_until_ready(jax.jit(lambda *arrays: call(*arrays, **attributes))(*arrays))


def i64(*values: int) -> np.ndarray:
    """An array attribute."""
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("plan_version", 2, "plan_version: expected 1, got 2; the Python and C++ halves"),
        ("plan_version", None, "plan_version: expected an int64, got no such attribute"),
        ("plan_version", "1", "plan_version: expected an int64, got an attribute of another type"),
        ("plan_version", np.int32(1), "plan_version: expected an int64, got an attribute of an"),
        ("num_ranks", 73, "num_ranks: expected an integer in [1, 72], got 73"),
        ("num_ranks", 0, "num_ranks: expected an integer in [1, 72], got 0"),
        ("num_operands", -1, "num_operands: expected an integer in [0, 2147483647], got -1"),
        ("buffer_bytes", -1, "buffer_bytes: expected an integer in [0, 9223372036854775807], got"),
        ("buffer_key", 7, "buffer_key: expected a string, got an attribute of another type"),
        ("buffer_key", "", f"{FILL}.base: expected no symmetric_buffer in a plan without buffer_k"),
        ("steps", 0, "steps: expected an integer in [1, 64], got 0"),
        ("steps", 65, "steps: expected an integer in [1, 64], got 65"),
        ("steps", 3, "steps.2.kind: expected a string, got no such attribute"),
        ("kernels", 2, "kernels.1.symbol: expected a string, got no such attribute"),
        ("kernels.0.spec", None, "kernels.0.spec: expected a string, got no such attribute"),
        ("kernels.0.spec", b"caf\xe9\0", r"kernels.0.spec: expected UTF-8, got caf\xe9\x00"),
        ("buffer_key", b"\xed\xa0\x80", r"buffer_key: expected UTF-8, got \xed\xa0\x80"),
        (f"{FILL}.kind", "copy", f"{FILL}.kind: expected launch or fill, got copy"),
        (f"{FILL}.kind", "\0a\u00e9", f"{FILL}.kind: expected launch or fill, got \\x00a\u00e9"),
        (f"{FILL}.base", "null", f"{FILL}.base: expected an array, got null"),
        (f"{FILL}.num_bytes", 0, f"{FILL}.num_bytes: expected an integer in [1, 9223372036854775"),
        (f"{FILL}.num_bytes", 4000, f"{FILL}: expected offset and extent inside the 4096 bytes of"
         " the symmetric buffer, got offset 128 and extent 4000"),
        (f"{LAUNCH}.kernel", 1, f"{LAUNCH}.kernel: expected an integer in [0, 0], got 1"),
        (f"{LAUNCH}.grid", i64(1, 2), f"{LAUNCH}.grid: expected an array of 3 int64, got 2"),
        (f"{LAUNCH}.grid", np.ones(3, np.int32), f"{LAUNCH}.grid: expected an array of int64, got"),
        (f"{LAUNCH}.grid", i64(0, 1, 1), f"{LAUNCH}.grid[0]: expected an integer in [1, 214748364"),
        (f"{LAUNCH}.grid", i64(131, 1, 1), f"{LAUNCH}.grid[0]: expected a multiple of the cluster's"
         " 2, got 131"),
        (f"{LAUNCH}.block", i64(1, 1, 1025), f"{LAUNCH}.block[2]: expected an integer in [1, 1024"),
        (f"{LAUNCH}.cluster", i64(17, 1, 1), f"{LAUNCH}.cluster[0]: expected an integer in [1, 16"),
        (f"{LAUNCH}.smem", -1, f"{LAUNCH}.smem: expected an integer in [0, 2147483647], got -1"),
        (f"{LAUNCH}.programmatic_serialization", 1,
         f"{LAUNCH}.programmatic_serialization: expected a bool, got an attribute of another type"),
        (f"{LAUNCH}.arguments", 129, f"{LAUNCH}.arguments: expected an integer in [0, 128], got 1"),
        (f"{LAUNCH}.arguments", 11, f"{LAUNCH}.arguments.10.name: expected a string, got no such"),
        (f"{LAUNCH}.arguments.8.value", 1, f"{LAUNCH}.arguments.8.value: expected a bool, got an"),
        (f"{SYMMETRIC}.kind", "event", f"{SYMMETRIC}.kind: expected pointer, bool, uint32,"
         " float32, symmetric_buffer, tensor_map or struct, got event"),
        (f"{LAUNCH}.arguments.0.base", "host", f"{LAUNCH}.arguments.0.base: expected null, operand,"
         " result or symmetric_buffer, got host"),
        (f"{LAUNCH}.arguments.0.index", 1, f"{LAUNCH}.arguments.0.index: expected an index of 1"
         " results, got 1"),
        (f"{LAUNCH}.arguments.7.index", 3, f"{LAUNCH}.arguments.7.index: expected an index of 3"
         " operands, got 3"),
        (f"{LAUNCH}.arguments.0.offset", -8, f"{LAUNCH}.arguments.0.offset: expected an integer"),
        (f"{LAUNCH}.arguments.0.offset", 1025, f"{LAUNCH} argument y: expected offset and extent"
         " inside the 1024 bytes of result 0, got offset 1025 and extent 0"),
        (f"{LAUNCH}.arguments.2.value", 1 << 32, f"{LAUNCH}.arguments.2.value: expected an integer"
         " in [0, 4294967295], got 4294967296"),
        (f"{LAUNCH}.arguments.3.value", 1, f"{LAUNCH}.arguments.3.value: expected a float64, got"),
        (f"{LAUNCH}.arguments.3.value", -1e39, f"{LAUNCH}.arguments.3.value: expected a number that"
         " a float32 can hold, got -1e+39"),
        (f"{ACTS}.base", "null", f"{ACTS}.base: expected an array, got null"),
        (f"{ACTS}.rank", 6, f"{ACTS}.rank: expected an integer in [1, 5], got 6"),
        (f"{ACTS}.dims", i64(128), f"{ACTS}.dims: expected an array of 2 int64, got 1"),
        (f"{ACTS}.dims", i64(128, 0), f"{ACTS}.dims[1]: expected an integer in [1, 4294967296], g"),
        (f"{ACTS}.dims", i64(128, 32), f"{LAUNCH} argument acts: expected offset and extent inside"
         " the 4096 bytes of the symmetric buffer, got offset 1024 and extent 4096"),
        (f"{ACTS}.strides", i64(128, 8), f"{ACTS}.strides: expected an array of 1 int64, got 2"),
        (f"{ACTS}.strides", i64(1 << 40), f"{ACTS}.strides[0]: expected an integer in [0, 1099511"),
        (f"{ACTS}.box", i64(128, 257), f"{ACTS}.box[1]: expected an integer in [1, 256], got 257"),
        (f"{ACTS}.dtype", 16, f"{ACTS}.dtype: expected an integer in [0, 15], got 16"),
        (f"{ACTS}.swizzle", 7, f"{ACTS}.swizzle: expected an integer in [0, 6], got 7"),
        (f"{ACTS}.interleave", 3, f"{ACTS}.interleave: expected an integer in [0, 2], got 3"),
        (f"{ACTS}.l2_promotion", 4, f"{ACTS}.l2_promotion: expected an integer in [0, 3], got 4"),
        (f"{ACTS}.oob_fill", 2, f"{ACTS}.oob_fill: expected an integer in [0, 1], got 2"),
        (f"{FACTORS}.fields", 0, f"{FACTORS}.fields: expected an integer in [1, 32], got 0"),
        (f"{FACTORS}.fields", 33, f"{FACTORS}.fields: expected an integer in [1, 32], got 33"),
        (f"{FACTORS}.fields", 9, f"{FACTORS}.fields.8.name: expected a string, got no such"),
        (f"{FACTORS}.fields", 5, "kernel malformed parameter factors: expected 24 bytes, got 48"),
        (f"{FACTORS}.fields.0.kind", "struct", f"{FACTORS}.fields.0.kind: expected pointer, bool,"
         " uint32 or float32, got struct"),
        (f"{FACTORS}.fields.0.kind", "tensor_map", f"{FACTORS}.fields.0.kind: expected pointer, b"),
        (f"{FACTORS}.fields.0.base", "host", f"{FACTORS}.fields.0.base: expected null, operand,"),
        (f"{FACTORS}.fields.0.index", 3, f"{FACTORS}.fields.0.index: expected an index of 3 ope"),
        (f"{FACTORS}.fields.0.offset", 2049, f"{LAUNCH} argument factors field scales: expected"
         " offset and extent inside the 2048 bytes of operand 1, got offset 2049 and extent 0"),
        (f"{FACTORS}.fields.6.offset", 4097, f"{LAUNCH} argument factors field rows: expected"
         " offset and extent inside the 4096 bytes of the symmetric buffer, got offset 4097"),
        (f"{FACTORS}.fields.1.value", -1, f"{FACTORS}.fields.1.value: expected an integer in [0"),
        (f"{FACTORS}.fields.2.value", 1, f"{FACTORS}.fields.2.value: expected a bool, got an att"),
        (f"{FACTORS}.fields.3.value", 1e39, f"{FACTORS}.fields.3.value: expected a number that a"),
        (f"{WEIGHTS}.offset", 16, f"{LAUNCH} argument weights: expected offset and extent inside"
         " the 2048 bytes of operand 1, got offset 16 and extent 2048"),
        (f"{WEIGHTS}.dims", i64(1 << 32, 1 << 32, 1 << 32, 1 << 32), f"{LAUNCH} argument weights:"
         " expected offset and extent inside the 2048 bytes of operand 1"),
    ],
)  # fmt: skip
def test_a_malformed_plan_is_refused(
    driver: RecordingDriver, name: str, value: object, text: str
) -> None:
    module = extension.module()
    module.register_symmetric_buffer(KEY, 0, BASE, [BASE], 0, plans.BUFFER_BYTES)
    changed = attributes("malformed")
    if value is None:
        del changed[name]
    else:
        changed[name] = value
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"jax_megamoe: {text}")):
            run(changed)
    finally:
        module.unregister_symmetric_buffer(KEY, 0)
    assert driver.launches() == []


def test_too_many_parameter_bytes(driver: RecordingDriver) -> None:
    changed = attributes("too_long")
    acts = {k: v for k, v in changed.items() if k.startswith(ACTS)}
    changed[f"{LAUNCH}.arguments"] = 50
    for index in range(5, 50):
        copy = f"{LAUNCH}.arguments.{index}"
        changed.update({k.replace(ACTS, copy): v for k, v in acts.items()})
    text = f"{LAUNCH}.arguments: expected at most 4096 bytes of parameters, got"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(changed)


def test_another_number_of_operands(driver: RecordingDriver) -> None:
    changed = attributes("operands") | {"num_operands": 4}
    with pytest.raises(jax.errors.JaxRuntimeError, match="number of operands: expected 4, got 3"):
        run(changed)


def test_no_buffer(driver: RecordingDriver) -> None:
    text = (
        'symmetric buffer "test/errors" on device 0: expected one allocated in this process, '
        "got none; allocate it before the first launch"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(attributes("no_buffer"))


@pytest.mark.parametrize(
    ("num_bytes", "num_ranks", "text"),
    [
        (4095, 1, 'symmetric buffer "test/errors": expected at least 4096 bytes, got 4095; alloc'),
        (4096, 2, 'symmetric buffer "test/errors": expected 2 ranks, got 1'),
    ],
)
def test_a_buffer_that_does_not_fit(
    driver: RecordingDriver, num_bytes: int, num_ranks: int, text: str
) -> None:
    module = extension.module()
    module.register_symmetric_buffer(KEY, 0, BASE, [BASE], 0, num_bytes)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            run(attributes("misfit", num_ranks))
    finally:
        module.unregister_symmetric_buffer(KEY, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"key": ""}, "key: expected a name, got an empty string"),
        ({"peer_bases": []}, "peer_bases: expected 1 to 72 addresses, got 0"),
        ({"peer_bases": [BASE] * 73}, "peer_bases: expected 1 to 72 addresses, got 73"),
        ({"rank": 2}, "rank: expected one of 2 ranks, got 2"),
        ({"rank": 1}, r"peer_bases\[1\]: expected the own base 1099511627776, got 1099511631872"),
        (
            {"base": BASE + 64, "peer_bases": [BASE + 64]},
            r"peer_bases\[0\]: expected an address al",
        ),
        (
            {"peer_bases": [BASE, 0]},
            r"peer_bases\[1\]: expected an address aligned to 128 bytes, got",
        ),
        ({"num_bytes": 0}, "num_bytes: expected at least 1, got 0"),
    ],
)
def test_registering_a_wrong_buffer(changes: dict[str, Any], text: str) -> None:
    buffer = {
        "key": KEY, "device_ordinal": 0, "base": BASE, "peer_bases": [BASE, BASE + 4096], "rank": 0,
        "num_bytes": 4096,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        extension.module().register_symmetric_buffer(**buffer | changes)


def test_registering_and_unregistering_twice() -> None:
    module = extension.module()
    module.register_symmetric_buffer(KEY, 3, BASE, [BASE], 0, 64)
    with pytest.raises(ValueError, match='"test/errors" on device 3: expected a name not in use'):
        module.register_symmetric_buffer(KEY, 3, BASE, [BASE], 0, 64)
    module.unregister_symmetric_buffer(KEY, 3)
    with pytest.raises(RuntimeError, match="on device 3: expected one allocated in this process"):
        module.unregister_symmetric_buffer(KEY, 3)


@pytest.mark.parametrize(
    ("cubin", "text"),
    [
        (b"k 8", "kernel {0}: expected 2 parameters, got 1; the kernel's source and the plan diff"),
        (b"k 8 8 8", "kernel {0}: expected 2 parameters, got more"),
        (b"k 8 4", "kernel {0} parameter y: expected 8 bytes, got 4"),
        (b"k 8 8\nl 8", "machine code of {0}: expected one kernel, got 2"),
        (b"", "machine code of {0}: expected one kernel, got 0"),
    ],
)
def test_machine_code_that_is_not_the_plans(
    driver: RecordingDriver, cubin: bytes, text: str
) -> None:
    symbol = f"other_{cubin.hex()}"
    with provider(lambda spec: cubin):
        check_pointer_plan(symbol, text.format(symbol))


def test_the_compilers_error_reaches_the_caller(driver: RecordingDriver) -> None:
    def fail(spec: str) -> bytes:
        raise OSError(f"no compiler for {extension.decode_kernel(spec).symbol}")

    with provider(fail):
        check_pointer_plan("uncompiled", "OSError: no compiler for uncompiled")
    with provider(lambda spec: "text"):  # pyright: ignore[reportArgumentType]
        check_pointer_plan("text", "cubin provider: expected bytes, got str")


class WithoutText(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(2, "No such file", "/cache/caf\udce9"), r"FileNotFoundError: [Errno 2] No such"),
        (OSError("/cache/caf\udce9"), r"OSError: /cache/caf\udce9"),
        (OSError("caf\u00e9 \0 after"), "OSError: caf\u00e9 \\x00 after"),
        (WithoutText(), "WithoutText: no text"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
    ids=["file name", "surrogate", "nul", "no text", "interrupt"],
)
def test_an_error_with_any_text_reaches_the_caller(
    driver: RecordingDriver, error: BaseException, text: str
) -> None:
    def fail(spec: str) -> bytes:
        raise error

    name = type(error).__name__
    with provider(fail):
        check_pointer_plan(f"unprintable_{name}", text)
        with pytest.raises(RuntimeError, match=re.escape(text)):
            launcher.program(plans.pointer_plan(f"unprintable_{name}"), ["x"], ["y"])


@pytest.mark.parametrize(
    ("operands", "results", "text"),
    [
        ([], [(BASE, 1024)], "number of operands: expected 3, got 0"),
        ([(BASE, 1024), (BASE, 2048), (BASE, 16)], [], "number of results: expected 1, got 0"),
        (
            [(BASE, 1024), (BASE, 2047), (BASE, 16)],
            [(BASE, 1024)],
            "steps.1 argument weights: expected offset and extent inside the 2047 bytes of operand "
            "1, got offset 0 and extent 2048",
        ),
        (
            [(BASE, 1024), (BASE, 2048), (BASE, 16)],
            [(BASE, 63)],
            "steps.1 argument y: expected offset and extent inside the 63 bytes of result 0, got "
            "offset 64 and extent 0",
        ),
        (
            [(BASE, 1024), (0, 2048), (BASE, 16)],
            [(BASE, 1024)],
            "operand 1: expected an address, got null",
        ),
    ],
)
def test_a_launch_checks_its_own_arrays(
    driver: RecordingDriver,
    operands: list[tuple[int, int]],
    results: list[tuple[int, int]],
    text: str,
) -> None:
    module = extension.module()
    module.register_symmetric_buffer(KEY, 0, BASE, [BASE], 0, plans.BUFFER_BYTES)
    plan = plans.whole_plan(1, "other_arrays")
    program = launcher.program(plan, ["x", "w", "table"], ["y"], buffer_key=KEY)
    program.prepare(0, [(BASE, 1024), (BASE, 2048), (BASE, 16)], [(BASE, 1024)])
    try:
        with pytest.raises(ValueError, match=re.escape(text)):
            program.launch(0, 7, operands, results)
    finally:
        module.unregister_symmetric_buffer(KEY, 0)
    assert driver.launches() == []


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("cuLibraryLoadData", "cuLibraryLoadData of {0}"),
        ("cuKernelGetFunction", "cuKernelGetFunction of {0}"),
        ("cuFuncSetAttribute", "{0} with 1024 bytes of shared memory"),
        ("cuFuncLoad", "cuFuncLoad of {0}"),
        ("cuLaunchKernelEx", "launch of {0}"),
    ],
)
def test_the_drivers_error_reaches_the_caller(
    driver: RecordingDriver, function: str, what: str
) -> None:
    symbol = f"failing_{function}"
    driver.fail(function, 719)
    text = what.format(symbol) + ": RECORDED_ERROR_719: from the recording driver"
    check_pointer_plan(symbol, text)
    driver.clear()
    jax.jit(lambda x: pointers(symbol, x))(plans.operands()["x"])


def test_a_tensor_map_the_driver_refuses(driver: RecordingDriver) -> None:
    module = extension.module()
    module.register_symmetric_buffer(KEY, 0, BASE, [BASE], 0, plans.BUFFER_BYTES)
    changed = attributes("misaligned") | {f"{ACTS}.offset": 1032}
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="cuTensorMapEncodeTiled for acts: "):
            run(changed)
    finally:
        module.unregister_symmetric_buffer(KEY, 0)


def pointers(symbol: str, x: jax.Array) -> jax.Array:
    """pointer_plan of a kernel of that name."""
    plan = plans.pointer_plan(symbol, smem=1024)
    return launcher.launch(plan, {"x": x}, plans.RESULTS)["y"]


def check_pointer_plan(symbol: str, text: str) -> None:
    """Asserts the error of pointer_plan with this kernel."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
        jax.block_until_ready(jax.jit(lambda x: pointers(symbol, x))(plans.operands()["x"]))
