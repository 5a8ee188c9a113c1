"""Values of Arrow's tables, in parquet files and data sets of the library datasets, as JSON has them."""

import json
from dataclasses import dataclass

from errors import DataError
from json_yaml import once

SAME = ("arrow.bool8", "datasets.features")  # beginnings of the names of types whose Python value is JSON's


@dataclass(frozen=True)
class Undecoded:
    """A value of an extension type that this program cannot read. It is refused wherever a field is read, and harmless in other fields."""

    extension: str


def records_of(name, schema, batches):
    """Yields the records of batches, which are tables or lists of undecoded records, with this Arrow schema."""
    import pyarrow

    convert = converter(pyarrow.field("", pyarrow.struct(list(schema))))
    records = (record for batch in batches for record in (batch if isinstance(batch, list) else batch.to_pylist()))
    for number, record in enumerate(records, 1):
        try:
            fields = convert(record)
        except DataError as error:
            raise DataError(f"record {number} of {name}: {error.what}", error.fix) from None
        yield fields


def saved_records(name, data):
    """Yields the records of a memory-mapped data set, with their mean size in bytes."""
    size = data.data.nbytes // max(1, len(data.data))
    for fields in records_of(name, data.data.schema, data.with_format("arrow").iter(batch_size=500)):
        yield None, fields, size


def converter(field):
    """Returns the function that converts a value of this Arrow field, which is not null, from the form of to_pylist(); None if it stays as it is. Null
    keys of objects are removed, because a table adds all keys of a column's objects to each of them. In JSON text a null is meant."""
    from pyarrow import types

    kind = field.type
    extension = getattr(kind, "extension_name", "") or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")
    kind = getattr(kind, "storage_type", kind)
    if extension == "arrow.json":
        return json_value
    if extension == "arrow.uuid":
        return str
    if extension and not extension.startswith(SAME):
        return lambda value: Undecoded(extension)
    if types.is_struct(kind):
        return object_converter([(part.name, converter(part)) for part in map(kind.field, range(kind.num_fields))])
    if types.is_map(kind):
        convert = converter(kind.item_field)
        return lambda pairs: {key: convert(value) if convert else value for key, value in pairs if value is not None}
    if hasattr(kind, "value_field"):  # lists of all kinds
        convert = converter(kind.value_field)
        return convert and (lambda values: [None if value is None else convert(value) for value in values])
    if types.is_dictionary(kind):
        return converter(field.with_type(kind.value_type))
    if types.is_decimal(kind):
        return lambda value: json.loads(format(value, "f"))
    return (lambda value: value.isoformat()) if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) else None


def object_converter(parts):
    def convert(value):
        return {name: convert(part) if convert else part for name, convert in parts if (part := value.get(name)) is not None}

    return convert


def json_value(text):
    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a value of Arrow's type arrow.json is broken JSON: {error}", "write the file again") from None
