DECLARE
    counts pg_catalog.int8[];
BEGIN
    IF NOT EXISTS (
            SELECT FROM pg_catalog.pg_proc AS p
            WHERE p.oid OPERATOR(pg_catalog.=) '{signature}'::pg_catalog.regprocedure
              AND pg_catalog.pg_get_userbyid(p.proowner) OPERATOR(pg_catalog.=) current_user
              AND p.proconfig OPERATOR(pg_catalog.=) '{"search_path=pg_catalog, pg_temp"}'::pg_catalog.text[]
              AND NOT EXISTS (SELECT FROM pg_catalog.aclexplode(p.proacl) AS a
                              WHERE a.grantee OPERATOR(pg_catalog.<>) p.proowner
                                AND pg_catalog.pg_get_userbyid(a.grantee) OPERATOR(pg_catalog.<>) {service_role})) THEN
        RAISE EXCEPTION 'function {function} was altered, or can be called by other roles than the service''s'
            USING HINT = 'alter_stream_table(query => …) makes it again.';
    ELSIF pg_catalog.pg_has_role(session_user, pgtrickle._service_role(), 'USAGE') IS NOT TRUE THEN
        RAISE EXCEPTION 'function {function} is the service''s to call';
    END IF;
    RETURN QUERY EXECUTE statement USING args;
END
