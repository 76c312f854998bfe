#variable_conflict use_column
DECLARE
    fits pg_catalog.bool;
    context pg_catalog.text;
BEGIN
{guard}    IF TG_OP OPERATOR(pg_catalog.=) 'INSERT' THEN
{insert}    ELSIF TG_OP OPERATOR(pg_catalog.=) 'UPDATE' THEN
{check_merge}{update}    ELSIF TG_OP OPERATOR(pg_catalog.=) 'DELETE' THEN
{delete}    END IF;
    -- There is no sequence on a new node, which no stream table reads yet: those that will read it re-initialize.
    IF pg_catalog.to_regclass('{turn}') IS NOT NULL THEN
        EXECUTE pgtrickle._store_or_mark('{stable_name}', TG_OP, TG_RELID, fits, {quoted_targets}, {quoted_selected});
    END IF;
    RETURN NEW; -- without an expression, the same as RETURN NULL
END
