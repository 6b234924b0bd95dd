"""Names the signals that end a process in order; the end of its terminal is one of them."""

import signal

__all__ = ["stop_signals"]


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT and SIGTERM, and SIGHUP where it is not ignored (`nohup`), as it then stays.

    A terminal that ends may send SIGHUP twice, by the kernel and by the shell: a second one says nothing more.
    """
    hangs_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hangs_up
