-- Which roles may use registered databases and sets of them.

-- The roles that may use a registered database, or a set of them, besides administrators. Roles that may use a set may
-- use its members.
CREATE OR REPLACE FUNCTION pgtrickle._allowed_roles(name text) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(DISTINCT role) FROM (
        SELECT unnest(d.roles) AS role FROM pgtrickle.pgt_databases AS d WHERE d.name = _allowed_roles.name
        UNION ALL
        SELECT unnest(s.roles) FROM pgtrickle.pgt_database_sets AS s
        WHERE s.name = _allowed_roles.name
           OR EXISTS (SELECT FROM pgtrickle.pgt_databases AS m
                      WHERE m.name = _allowed_roles.name AND pgtrickle._is_set_member(m.name, s.members, s.pattern))
    ) AS users
$$;

CREATE OR REPLACE FUNCTION pgtrickle._refuse_database_use(role name, name text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'role % may not read tables of the registered database %', quote_ident(role), quote_ident(name)
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Ask the owner of the database or the role that installed pgtrickle.';
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._require_database_use(caller name, name text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE')
       AND NOT EXISTS (SELECT FROM unnest(pgtrickle._allowed_roles(name)) AS role
                       JOIN pg_roles AS r ON r.rolname = role
                       WHERE pgtrickle._acts_for(caller, r.oid)) THEN
        PERFORM pgtrickle._refuse_database_use(caller, name);
    END IF;
END
$$;

-- Why stream tables may no longer be refreshed: their owner, or that of a foreign table that they read, may not use a
-- registered database. One statement for all members of a set.
CREATE OR REPLACE FUNCTION pgtrickle._database_use_problems(ids bigint[]) RETURNS TABLE (id bigint, problem text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH needed AS MATERIALIZED (
        SELECT DISTINCT s.pgt_id, f.database, role.oid AS role
        FROM pgtrickle.pgt_stream_tables AS s
        JOIN pgtrickle.pgt_dependencies AS d USING (pgt_id)
        JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = d.source_relid
        JOIN pg_class AS c ON c.oid IN (s.pgt_relid, CASE WHEN f.resolved_by IS NOT NULL THEN f.relid END)
        CROSS JOIN LATERAL (SELECT c.relowner AS oid) AS role
        WHERE s.pgt_id = ANY (ids) AND f.database NOT LIKE '@%'
    ), roles AS MATERIALIZED (
        SELECT r.oid, r.rolname,
               ARRAY(SELECT u.rolname::text FROM pg_roles AS u
                     WHERE u.rolname IN (SELECT unnest(d.roles) FROM pgtrickle.pgt_databases AS d
                                         UNION SELECT unnest(s.roles) FROM pgtrickle.pgt_database_sets AS s)
                       AND pgtrickle._acts_for(r.rolname, u.oid)) AS users
        FROM pg_roles AS r
        WHERE r.oid IN (SELECT n.role FROM needed AS n)
          AND NOT has_function_privilege(r.oid, 'pgtrickle._administer()', 'EXECUTE')
    )
    SELECT n.pgt_id,
           string_agg(DISTINCT format('role %I may not read tables of the registered database %I', r.rolname,
                                      n.database), '; ')
    FROM needed AS n JOIN roles AS r ON r.oid = n.role
    WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = n.database AND d.roles && r.users)
      AND NOT EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s
                      WHERE s.roles && r.users AND pgtrickle._is_set_member(n.database, s.members, s.pattern))
    GROUP BY n.pgt_id
$$;

-- Raises if the current role may not use a registered database that a query reads.
CREATE OR REPLACE FUNCTION pgtrickle._check_database_use(databases text[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    refused text := (SELECT min(name) FROM unnest(databases) AS name
                     WHERE name NOT LIKE '@%'
                       AND name NOT IN (SELECT d.name FROM pgtrickle.pgt_usable_databases AS d));
BEGIN
    IF refused IS NOT NULL THEN
        PERFORM pgtrickle._database_dsn(refused); -- raises the error
    END IF;
END
$$;

-- Registered databases that the current role may read, and their DSNs. The view reads with the rights of its owner.
CREATE OR REPLACE VIEW pgtrickle.pgt_usable_databases WITH (security_barrier) AS
SELECT d.name, d.dsn
FROM pgtrickle.pgt_databases AS d
WHERE pgtrickle._is_administrator()
   OR EXISTS (SELECT FROM pg_catalog.pg_roles AS r
              WHERE pgtrickle._acts_for(current_user, r.oid)
                AND (r.rolname = ANY (d.roles)
                     OR EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s
                                WHERE r.rolname = ANY (s.roles)
                                  AND pgtrickle._is_set_member(d.name, s.members, s.pattern))));

CREATE OR REPLACE FUNCTION pgtrickle._database_dsn(name text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Citus knows the address of a node.
    found text := CASE WHEN name LIKE '@%' THEN (SELECT format('host=%s port=%s', n.host, n.port)
                                                 FROM pgtrickle._citus_nodes() AS n
                                                  WHERE pgtrickle._node_name(n.groupid) = name)
                       ELSE (SELECT d.dsn FROM pgtrickle.pgt_usable_databases AS d WHERE d.name = _database_dsn.name)
                           END;
BEGIN
    IF found IS NULL AND pgtrickle._is_registered(name) THEN
        PERFORM pgtrickle._refuse_database_use(current_user, name);
    ELSIF found IS NULL THEN
        RAISE EXCEPTION 'there is no registered database %', quote_ident(name)
            USING ERRCODE = 'undefined_object',
                  HINT = pgtrickle._registered_databases() || ' `pgtrickle database add NAME DSN` registers one.';
    END IF;
    RETURN found;
END
$$;
