"""Asks a backend one question, in this process; whatever is raised becomes a result."""

import ctypes
import gc
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch

import anychip
from anychip.conformance.call_site import call_of
from anychip.conformance.case import Case, CheckFailedError, Context, Level, undeclared_capability
from anychip.conformance.report import Outcome, Result
from anychip.contract import Backend, UnsupportedError
from anychip.dispatch import selection


def settle() -> None:
    """Keeps what is imported, and memory that is freed, where the C library can.

    Else a tenth of all time goes to looking through the first and to asking for the second again,
    page by page; and a result that nothing was written to would be 0, as new pages are.
    """
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at most this
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def activate(backend: str | Backend | None) -> Backend:
    """The backend under test, serving its device type in this process.

    Raises:
        UnknownBackendError, BackendUnavailableError: as ``anychip.use``.
    """
    if not isinstance(backend, Backend):
        return anychip.use(backend)
    selection.activate(backend)
    return backend


def run_case(case: Case, backend: Backend, level: Level, seed: int = 0) -> Result:
    """Asks one question, in this process; whatever is raised becomes a result."""
    context = Context(backend, level, seed)
    start = time.perf_counter()
    outcome: Outcome = "passed"
    reason = ""
    missing: str | None = None
    call: str | None = None
    try:
        if case.capability is not None and case.capability not in backend.capabilities:
            outcome, missing = "unsupported", case.capability
        elif case.devices > 1 and case.devices > (count := backend.device_count()):
            outcome, reason = "unsupported", f"needs {case.devices} devices, and here is {count}"
        else:
            with nullcontext() if case.elsewhere else _clean_state(backend):
                case.run(context)
                context.served_by = context.told(context.served_by)
    except CheckFailedError as error:
        outcome, reason, call = "failed", str(error), call_of(error)
    except UnsupportedError as error:
        missing = undeclared_capability(error, backend)
        outcome, reason = ("unsupported", "") if missing else ("failed", describe(error))
    except Exception as error:
        outcome, reason, call = "failed", describe(error), call_of(error)
    served_by = None
    with suppress(Exception):  # a backend that has failed may fail at this question too
        served_by = context.told(context.served_by)
    return Result(
        case=case.id,
        outcome=outcome,
        reason=f"{missing} is not declared" if missing else reason,
        capability=missing,
        note=context.note,
        seconds=time.perf_counter() - start,
        call=context.told(context.call) or call,
        served_by=served_by,
        measurements=tuple(context.measurements),
        curve=context.curve,
        coverage=context.coverage,
    )


@contextmanager
def _clean_state(backend: Backend) -> Iterator[None]:
    """Every case starts on device 0, from one random state, and leaves autograd as it was."""
    with suppress(Exception):  # a set_device that fails is for the device chapter to find
        backend.set_device(0)
    _seed(backend)
    with torch.enable_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _seed(backend: Backend) -> None:
    # torch.manual_seed keeps a stack trace for each kind of device that has not started.
    if backend.is_host:
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)


def describe(error: BaseException) -> str:
    """An exception that no check raised: type, message, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    where = "; ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {error}\nraised at {where}"
