"""The Spark session and its effects on the process."""

from __future__ import annotations

import signal

from pgtrickle.spark.session import spark_session


def test_spark_keeps_the_existing_ctrl_c_handler() -> None:
    spark_session()
    handler = signal.getsignal(signal.SIGINT)
    assert not (getattr(handler, "__module__", None) or "").startswith("pyspark")
