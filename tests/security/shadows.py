"""What a session can have found in place of a name without a schema.

Types are looked for in its temporary schema first, unless the search path names that schema elsewhere.
"""

from __future__ import annotations

_TYPES = ("text", "bool", "int2", "int4", "int8", "oid", "name", "regclass")
_DOMAIN = "CREATE DOMAIN {where}.{name} AS pg_catalog.{name} CHECK ({m}.evil())"
_FUNCTIONS = """
CREATE FUNCTION {m}.txid_current() RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN pg_catalog.txid_current(); END $$;
CREATE FUNCTION {m}.to_regclass(text) RETURNS regclass LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN pg_catalog.to_regclass($1); END $$;
CREATE FUNCTION {m}.pg_sequence_last_value(regclass) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN pg_catalog.pg_sequence_last_value($1); END $$;
CREATE FUNCTION {m}.pg_stat_get_live_tuples(oid) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN pg_catalog.pg_stat_get_live_tuples($1); END $$;
CREATE FUNCTION {m}.same(text, text) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN $1 OPERATOR(pg_catalog.=) $2; END $$;
CREATE FUNCTION {m}.same(bytea, bytea) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN $1 OPERATOR(pg_catalog.=) $2; END $$;
CREATE FUNCTION {m}.less(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN $1 OPERATOR(pg_catalog.<=) $2; END $$;
CREATE FUNCTION {m}.rest(bigint, bigint) RETURNS bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN $1 OPERATOR(pg_catalog.%) $2; END $$;
CREATE OPERATOR {m}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {m}.same);
CREATE OPERATOR {m}.= (LEFTARG = bytea, RIGHTARG = bytea, FUNCTION = {m}.same);
CREATE OPERATOR {m}.<= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {m}.less);
CREATE OPERATOR {m}.% (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {m}.rest);
SET search_path = {m}, pg_catalog;
"""


def shadows(way: str, mallory: str) -> list[str]:
    """Statements after which names without a schema mean mallory's own things, which call mallory.evil()."""
    if way == "temporary":
        return [_DOMAIN.format(where="pg_temp", name=name, m=mallory) for name in _TYPES]
    domains = [_DOMAIN.format(where=mallory, name=name, m=mallory) for name in _TYPES]
    return [_FUNCTIONS.format(m=mallory), *domains]
