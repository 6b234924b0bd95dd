"""A server whose answers never end."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def server(kind):
    """Serve what trickles (a byte now and then, for ever) or floods."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            if kind == "head":  # its headers never end
                while not ended.wait(0.02):
                    self.wfile.write(b"x: y\r\n")
                return
            self.wfile.write(b"Content-Type: application/json\r\n\r\n")
            while not ended.wait(0.02 if kind == "trickle" else 0):
                self.wfile.write(b" " if kind == "trickle" else b" " * 65536)

        do_HEAD = do_GET  # noqa: N815 - the name that the library asks for

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # the client has gone

    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            ended.set()
            made.shutdown()
            thread.join()
