"""A diffusing computation: work is split and handed on at random; when all of it has ended nobody in particular knows.

The end is a stable property: once no message is under way and nobody works, it stays so.  A snapshot finds it.
"""

from __future__ import annotations

from cutwater.process_networks import Network, Process

WORK = 200


class Worker(Process):
    done: int = 0

    def on_start(self, ctx):
        if ctx.name == "worker-0":
            ctx.send(ctx.outputs[0], WORK)

    def on_message(self, ctx, sender, message):
        """Do one piece; split the rest and hand it to two neighbours."""
        self.done += 1
        rest = message - 1
        half = ctx.random.randint(0, rest)
        for part in (half, rest - half):
            if part:
                ctx.send(ctx.random.choice(ctx.outputs), part)


def build() -> Network:
    network = Network("diffusing", messages=[int])
    names = [f"worker-{i}" for i in range(6)]
    for name in names:
        network.add(name, Worker())
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            network.connect_both(name, other)
    return network


def main() -> None:
    run = build().run_local(seed=5)
    early = run.snapshot()
    found = run.await_termination(every="1ms")
    late = run.last_snapshot
    assert found is not None
    assert late is not None
    done = sum(state.done for _, state in late.states())
    print(f"snapshot {early.id}: {len(early.messages())} pieces under way")
    print(f"snapshot {late.id}: {found.what}, {done} of {WORK} pieces done")


if __name__ == "__main__":
    main()
