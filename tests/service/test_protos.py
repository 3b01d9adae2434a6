"""The committed stubs belong to the committed .proto files; checked without the generator or the network."""

import hashlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tools import make_protos
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb

TYPE_NAMES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}
FIELD = re.compile(r"^ +(?:repeated |optional )?([\w.]+) (\w+) = (\d+);$", re.MULTILINE)


def type_name(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return str(field.message_type.name)
    return field.enum_type.name if field.enum_type is not None else TYPE_NAMES[field.type]


def fields_of_text(path: Path) -> set[tuple[str, str, int]]:
    text = path.read_text(encoding="utf-8")
    return {(t.rpartition(".")[2], name, int(n)) for t, name, n in FIELD.findall(text)}


def messages_of(descriptors: list[Descriptor]) -> list[Descriptor]:
    return [m for d in descriptors for m in (d, *messages_of(list(d.nested_types)))]


def test_stubs_have_every_field_of_the_proto_text() -> None:
    assert pb.DESCRIPTOR.name == "xgr/v1/recommend.proto"
    messages = messages_of(list(pb.DESCRIPTOR.message_types_by_name.values()))
    in_stubs = {(type_name(f), f.name, f.number) for m in messages for f in m.fields}
    assert in_stubs == fields_of_text(make_protos.PROTO_ROOT / pb.DESCRIPTOR.name)


def test_checksums_of_protos_and_stubs_are_the_recorded_ones() -> None:
    stubs = make_protos.committed()
    recorded = stubs.pop(make_protos.SUMS)
    assert make_protos.checksums(stubs) == recorded
    names = dict(line.split("  ")[::-1] for line in recorded.splitlines())
    proto = make_protos.PROTO_ROOT / "xgr" / "v1" / "recommend.proto"
    assert names["proto/xgr/v1/recommend.proto"] == hashlib.sha256(proto.read_bytes()).hexdigest()


def test_imports_are_moved_and_the_registered_name_is_not() -> None:
    text = "from xgr.v1 import a_pb2 as x\nfrom google.protobuf import b\nf(D, 'xgr.v1.a_pb2', g)\nb'xgr/v1/a.proto'\n"
    assert make_protos.move_imports(text) == (
        "from xgr_runtime.service._pb.xgr.v1 import a_pb2 as x\nfrom google.protobuf import b\n"
        "f(D, 'xgr_runtime.service._pb.xgr.v1.a_pb2', g)\nb'xgr/v1/a.proto'\n"
    )


def test_messages_pickle_by_the_moved_module_name() -> None:
    message = pb.RecommendRequest(request_id="r", searches=[pb.Search(beam_width=3)])
    assert pickle.loads(pickle.dumps(message)) == message


def test_stubs_import_without_a_warning() -> None:
    """Both generators promise warnings, later errors, when code and library are of distant versions."""
    code = "import xgr_runtime.service._pb.xgr.v1.recommend_pb2_grpc, xgr_runtime.service.server"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_messages_are_packed() -> None:
    """A packed field is one length-delimited record: tag with wire type 2, length, then the numbers."""
    assert pb.Int64Values(values=[1, 2]).SerializeToString() == b"\x0a\x02\x01\x02"
    assert pb.SidValues(values=[1, 2]).SerializeToString() == b"\x12\x02\x01\x02"
    assert pb.Search(beam_widths=[1, 2]).SerializeToString() == b"\x2a\x02\x01\x02"
    assert pb.SearchResult(beam_widths=[1, 2]).SerializeToString() == b"\x82\x01\x02\x01\x02"
