"""Many threads that run one function at once."""

import threading


def in_threads(work, count=8):
    """Run work(0), work(1), .. in a thread each. Raises the first exception of any."""
    failures = []

    def run(at):
        try:
            work(at)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=run, args=(at,)) for at in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
