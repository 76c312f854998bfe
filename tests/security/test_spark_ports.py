"""Other accounts of the machine can connect to Spark's ports but get nothing from them."""

from __future__ import annotations

import socket
import struct

from pgtrickle.spark.session import spark_session

RPC_REQUEST = 3  # a message's type in Spark's network protocol


def test_spark_accepts_no_messages_without_authentication() -> None:
    """Without authentication it deserializes the objects that are sent to it, which can run any code."""
    port = int(spark_session().sparkContext.getConf().get("spark.driver.port", ""))
    body = bytes(20)
    header = struct.pack(">qbqi", 8 + 1 + 8 + 4 + len(body), RPC_REQUEST, 7, len(body))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        stranger.sendall(header + body)
        answer = stranger.recv(4096).decode(errors="replace")
    assert "SaslMessage" in answer
    assert "ObjectInputStream" not in answer
