"""The machine's float32 matrix product through XLA as a worker: one "step" is one product of two large matrices."""

from benchmarks.peers.serve import open_pipe, serve
from holdfast.analysis.profile import Matmul


def main() -> None:
    say = open_pipe()
    matmul = Matmul("float32")

    def multiply(times: int) -> list[float]:
        matmul.run(times)
        return []

    serve(multiply, {"parameters": 0, "flops_per_step": matmul.flops, "versions": {}}, say)


if __name__ == "__main__":
    main()
