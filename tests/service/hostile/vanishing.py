"""`python -m tests.service.hostile.vanishing TARGET COUNT`: opens calls that wait for ever, says so, and waits to be killed."""

import asyncio
import sys

import grpc

from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb

METHOD = "/xgr.v1.RecommendService/Recommend"


async def main(target: str, count: int) -> None:
    """Every second call stops in the middle of its message's stream: it is never half-closed."""
    message = pb.RecommendRequest(
        history_item_ids=pb.Int64Values(values=[1]), searches=[pb.Search(catalog="wait")]
    ).SerializeToString()
    async with grpc.aio.insecure_channel(target) as channel:
        calls = [
            asyncio.ensure_future(_wait(channel.unary_unary(METHOD)(message))) for _ in range(count)
        ]
        streams = [channel.stream_unary(METHOD)() for _ in range(count)]
        for stream in streams:
            await stream.write(message)
        sys.stdout.write("waiting\n")
        sys.stdout.flush()
        await asyncio.gather(*calls)


async def _wait(call: grpc.aio.UnaryUnaryCall) -> None:
    await call


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
