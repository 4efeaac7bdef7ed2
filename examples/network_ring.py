"""A token goes round a ring.  One process is careless with it; the detector says from a snapshot what became of it."""

from __future__ import annotations

from cutwater.process_networks import Network, Process, tokens

TOKEN = "the token"


class Station(Process):
    holds: bool = False
    rounds: int = 0
    careless: str = ""
    """"drops" or "copies" the token in its fifth round."""

    def on_start(self, ctx):
        if self.holds:
            ctx.timer(1, TOKEN)

    def on_message(self, ctx, sender, message):
        self.holds = True
        ctx.timer(1, message)  # works for a while, then passes it on

    def on_timer(self, ctx, message):
        self.rounds += 1
        self.holds = False
        times = {"drops": 0, "copies": 2}.get(self.careless, 1) if self.rounds == 5 else 1
        for _ in range(times):
            ctx.send(ctx.outputs[0], message)


def build(careless: str) -> Network:
    network = Network("ring", messages=[str])
    names = [f"station-{i}" for i in range(4)]
    for i, name in enumerate(names):
        network.add(name, Station(holds=i == 0, careless=careless if i == 2 else ""))
    network.ring(*names)
    return network


def main() -> None:
    # A station holds the token from the message until its timer; else it lies in a channel.
    count = tokens(lambda name, state: [TOKEN] * state.holds, lambda message: [message], [TOKEN])
    for careless in ("", "drops", "copies"):
        run = build(careless).run_local(seed=7)
        found = run.watch(count, every="5ms", timeout="200ms")
        print(f"{careless or 'careful'}: {found.detail if found else 'always exactly one token'}")


if __name__ == "__main__":
    main()
