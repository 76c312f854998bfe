-- What tells rows without a key apart: 128 bits of what they print. Not md5(): a server in FIPS mode refuses it.
CREATE OR REPLACE FUNCTION pgtrickle._row_id(printed text) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$
    SELECT (pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(printed COLLATE pg_catalog."C", 0)), 16, '0')
            || pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(printed COLLATE pg_catalog."C", 1)), 16, '0'))::uuid
$$;
