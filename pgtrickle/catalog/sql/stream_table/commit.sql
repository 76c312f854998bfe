-- What a refresh needs to change a stream table of a role other than the service's: see pgtrickle/postgres/fence.py
-- and decision 019.

-- Raises if code of an owner would run when the transaction of `backend` commits, with the rights of the session:
-- deferrable triggers and constraints of tables that it wrote to. Foreign keys are among them: planning their check
-- may run code in index expressions. `ddl` says that the refresh itself altered tables.
CREATE OR REPLACE FUNCTION pgtrickle._check_commit(backend integer DEFAULT pg_backend_pid(), ddl boolean DEFAULT false)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    waiting record;
    altered regclass;
BEGIN
    -- What is deferrable now may not have been when a row was written.
    SELECT c.oid INTO altered
    FROM pg_lock_status() AS l
    JOIN pg_class AS c ON c.oid = l.relation AND c.relpersistence <> 't' AND c.oid >= 16384
    WHERE l.pid = backend AND l.locktype = 'relation' AND l.granted AND NOT ddl
      AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND c.relnamespace NOT IN ('pgtrickle'::regnamespace, 'pgtrickle_changes'::regnamespace,
                                 'pgtrickle_views'::regnamespace)
      AND NOT EXISTS (SELECT FROM pg_namespace AS n WHERE n.oid = c.relnamespace AND n.nspname = 'pg_toast')
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% was locked or altered by a trigger during the refresh', altered
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Triggers and functions that a refresh runs must not alter or lock tables.';
    END IF;
    SELECT t.tgrelid::regclass AS relation, coalesce(c.conname, t.tgname) AS name INTO waiting
    FROM pg_lock_status() AS l
    JOIN pg_trigger AS t ON t.tgrelid = l.relation AND t.tgdeferrable
    LEFT JOIN pg_constraint AS c ON c.oid = t.tgconstraint
    WHERE l.pid = backend AND l.locktype = 'relation' AND l.granted
      AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND t.tgrelid <> 'pgtrickle.pgt_openings'::regclass
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'constraint or trigger % of % is deferrable: it would run with the rights of the service',
                quote_ident(waiting.name), waiting.relation
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Make it NOT DEFERRABLE, or drop it: a refresh of the stream table writes to that table.';
    END IF;
END
$$;

-- Creates a new table for the state of a stream table's groups. It belongs to the catalog's owner; the stream table's
-- owner may write to it.
CREATE OR REPLACE FUNCTION pgtrickle._make_state(id bigint, names text[], types text[], collations text[],
                                                 keys integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    state text := format('pgtrickle_views.%I', 'state_' || id);
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS %s', state);
    EXECUTE format('CREATE TABLE %s (%s, known boolean NOT NULL DEFAULT false%s, UNIQUE NULLS NOT DISTINCT (%s))',
                   state,
        (SELECT string_agg(format('%I %s%s%s', c.name, pgtrickle._checked_type(c.type),
                                  ' COLLATE ' || c.coll::regcollation,
                                  CASE WHEN c.n > keys THEN ' NOT NULL' END), ', ' ORDER BY c.n)
         FROM unnest(names, types, collations) WITH ORDINALITY AS c (name, type, coll, n)),
        CASE WHEN keys = 0 THEN ', singleton boolean NOT NULL DEFAULT true' END,
        coalesce((SELECT string_agg(quote_ident(k), ', ' ORDER BY n)
                  FROM unnest(names[1 : keys]) WITH ORDINALITY AS u (k, n)), 'singleton'));
    PERFORM pgtrickle._protect(state::regclass);
    IF keys > 0 THEN
        -- Groups without rows are found and removed without reading the others.
        EXECUTE format('CREATE INDEX ON %s (n) WHERE n = 0', state);
    END IF;
    PERFORM pgtrickle._grant_state(id);
END
$$;

-- Lets only the owner of a stream table write to its state: after it was created, and after the owner changed.
CREATE OR REPLACE FUNCTION pgtrickle._grant_state(id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    state regclass := to_regclass(format('pgtrickle_views.%I', 'state_' || id));
    owner oid := (SELECT c.relowner FROM pgtrickle.pgt_stream_tables AS s JOIN pg_class AS c ON c.oid = s.pgt_relid
                  WHERE s.pgt_id = id);
    other oid;
BEGIN
    IF state IS NULL OR (SELECT c.relowner = owner FROM pg_class AS c WHERE c.oid = state) THEN
        RETURN; -- created by an earlier version, for its owner
    END IF;
    FOR other IN SELECT DISTINCT a.grantee FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
                 WHERE c.oid = state AND a.grantee NOT IN (0, owner, c.relowner) LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %I', state, pg_get_userbyid(other));
    END LOOP;
    IF NOT has_table_privilege(owner, state, 'SELECT') OR NOT has_table_privilege(owner, state, 'INSERT') THEN
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %I', state, pg_get_userbyid(owner));
    END IF;
END
$$;

-- Checks that a type exists, for use in DDL.
CREATE OR REPLACE FUNCTION pgtrickle._checked_type(type text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF to_regtype(type) IS NULL THEN
        RAISE EXCEPTION 'there is no type %', quote_nullable(type) USING ERRCODE = 'undefined_object';
    END IF;
    RETURN type;
END
$$;
