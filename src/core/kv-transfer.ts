import { create, type DescField, type DescMessage, ScalarType } from '@bufbuild/protobuf';
import {
  type KvBlockIds,
  KvBlockIdsSchema,
  KvExtraMemberSchema,
  type KvTransferParams,
  KvTransferParamsSchema,
} from '../../gen/baton/v1/kv_transfer_pb.ts';
import {
  decodeString,
  type Element,
  lastOfKey,
  type Member,
  readWholeNumbers,
  scanArray,
  scanObject,
} from './json-scan.ts';

type Fields = Record<string, unknown>;

/** A key of the JSON object that has a typed field, of the message itself or of one of its connector families. */
interface KnownKey {
  /** Its place in the default member order. */
  readonly place: number;
  readonly field: DescField;
  readonly family: DescField | undefined;
}

interface Slot {
  /** The key's JSON text between its quotes. */
  readonly key: string;
  /** The value's JSON text; made on demand, since block lists are long and often only the order is asked for. */
  readonly json: () => string;
}

const UINT32_MAX = 4_294_967_295;

// Objects above this size have no typed form; it bounds the work that one member can cause.
const MAX_TYPED_OBJECT_BYTES = 65_536;

const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
const strictDecoder = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();

// In field-number order, which is the default member order. The field's name in the contract is the JSON key.
const KNOWN: ReadonlyMap<string, KnownKey> = new Map(
  byNumber(KvTransferParamsSchema)
    .flatMap((field): { field: DescField; family: DescField | undefined }[] => {
      if (field.fieldKind === 'list') return [];
      if (field.fieldKind === 'message' && field.oneof?.name === 'family') {
        return byNumber(field.message).map((inner) => ({ field: inner, family: field }));
      }
      return [{ field, family: undefined }];
    })
    .map((known, place) => [known.field.name, { ...known, place }]),
);

function byNumber(desc: DescMessage): readonly DescField[] {
  return desc.fields.toSorted((a, b) => a.number - b.number);
}

/**
 * Turns an engine's `kv_transfer_params` into the message, losing nothing but white space between members; undefined
 * where the bytes are not one JSON object in UTF-8.
 */
export function decodeKvTransferParams(json: Uint8Array): KvTransferParams | undefined {
  const scan = scanObject(json);
  if (scan.kind !== 'object' || !isUtf8(json)) return undefined;
  const m = create(KvTransferParamsSchema);
  const isLast = lastOfKey(scan.members);
  const order: string[] = [];
  for (let index = 0; index < scan.members.length; index++) {
    const member = scan.members[index];
    if (member === undefined) break;
    const key = writtenKey(json, member);
    order.push(key);
    const known = KNOWN.get(key);
    // Only the last of duplicates is what an engine reads, so only that one may stand in a typed field.
    if (known !== undefined && isLast(index)) {
      if (member.type === 'null') {
        m.nullMembers.push(key);
        continue;
      }
      if (setTyped(m, known, json, member)) continue;
    }
    const text = decoder.decode(json.subarray(member.valueStart, member.valueEnd));
    m.extra.push(create(KvExtraMemberSchema, { key, json: text }));
  }
  if (!isDefaultOrder(m, order)) m.memberOrder = order;
  return m;
}

/** The key as it is written; one without escapes, of ASCII, has as many bytes as characters. */
function writtenKey(json: Uint8Array, { key, keyStart, keyEnd }: Member): string {
  if (key.length === keyEnd - keyStart - 2) return key;
  return decoder.decode(json.subarray(keyStart + 1, keyEnd - 1));
}

/** Whether the keys of the object that `m` was read from stand as `m` alone would be written. */
function isDefaultOrder(m: KvTransferParams, order: readonly string[]): boolean {
  if (m.extra.length > 0 || !order.every((key) => KNOWN.has(key))) {
    return slotsOf(m).every((slot, index) => slot.key === order[index]);
  }
  // Each key once, and of none but the known ones: their places tell, which costs much less than to write them.
  let before = -1;
  for (const key of order) {
    const place = KNOWN.get(key)?.place ?? -1;
    if (place < before) return false;
    before = place;
  }
  return true;
}

/**
 * Writes the message as compact JSON for an engine; throws a TypeError where a member of a message made elsewhere is no
 * JSON (`hasValidMembers` tells).
 */
export function encodeKvTransferParams(m: KvTransferParams): Uint8Array {
  if (!hasValidMembers(m)) throw new TypeError('kv_transfer_params holds a member that is not JSON');
  let slots: readonly Slot[] = slotsOf(m);
  if (m.memberOrder.length > 0) slots = reorder(slots, m.memberOrder);
  return encoder.encode(`{${slots.map((slot) => `"${slot.key}":${slot.json()}`).join(',')}}`);
}

/** Whether each raw member is exactly one JSON member and each number a JSON number, so that nothing else is smuggled in. */
export function hasValidMembers(m: KvTransferParams): boolean {
  if (m.remoteBlocksExpiryTime !== undefined && !Number.isFinite(m.remoteBlocksExpiryTime)) return false;
  return m.extra.every((extra) => {
    const scan = scanObject(encoder.encode(`{"${extra.key}":${extra.json}}`));
    const member = scan.kind === 'object' && scan.members.length === 1 ? scan.members[0] : undefined;
    return member !== undefined && member.keyEnd === encoder.encode(extra.key).length + 3;
  });
}

/** The JSON text an engine reads for that key, "null" included; undefined where the key is absent. */
export function memberText(m: KvTransferParams, key: string): string | undefined {
  const known = KNOWN.get(key);
  const value = known === undefined ? undefined : typedValue(m, known);
  if (known !== undefined && value !== undefined) return textOf(known.field, value);
  if (m.nullMembers.includes(key)) return 'null';
  return m.extra.findLast((extra) => decodeKey(extra.key) === key)?.json;
}

/** Whether any key occurs more than once. */
export function hasDuplicateKeys(m: KvTransferParams): boolean {
  // A typed field, or a null, is written once.
  if (m.extra.length === 0) return false;
  const keys = slotsOf(m).map((slot) => decodeKey(slot.key));
  return new Set(keys).size !== keys.length;
}

/** The string an engine reads for that key; undefined where it is absent or not a string. */
export function stringMember(m: KvTransferParams, key: string): string | undefined {
  const text = memberText(m, key);
  if (text === undefined || !text.startsWith('"')) return undefined;
  const value: unknown = JSON.parse(text);
  return typeof value === 'string' ? value : undefined;
}

/** The block ids per KV-cache group; undefined where absent, flat or not a list of lists of uint32. */
export function blockIds(m: KvTransferParams): readonly (readonly number[])[] | undefined {
  const ids = m.remoteBlockIds;
  return ids === undefined || ids.flat.length > 0 ? undefined : ids.groups.map((group) => group.ids);
}

/** The number of tokens whose KV the blocks hold; undefined where absent or not a uint32. */
export function numTokens(m: KvTransferParams): number | undefined {
  return m.remoteNumTokens;
}

/** The side-channel port, written as a number or as a string of digits; undefined where it is neither or not in 1..65535. */
export function remotePort(m: KvTransferParams): number | undefined {
  const text = m.remotePort === undefined ? stringMember(m, 'remote_port') : String(m.remotePort);
  if (text === undefined || !/^[1-9][0-9]{0,4}$/.test(text)) return undefined;
  const port = Number(text);
  return port <= 65_535 ? port : undefined;
}

function isUtf8(bytes: Uint8Array): boolean {
  try {
    strictDecoder.decode(bytes);
    return true;
  } catch {
    return false;
  }
}

/** The key behind its JSON text; a text that is no JSON string stands for itself. */
function decodeKey(key: string): string {
  if (!key.includes('\\')) return key;
  try {
    return String(JSON.parse(`"${key}"`));
  } catch {
    return key;
  }
}

function typedValue(m: KvTransferParams, known: KnownKey): unknown {
  if (known.family === undefined) return (m as Fields)[known.field.localName];
  if (m.family.case !== known.family.localName) return undefined;
  return (m.family.value as Fields | undefined)?.[known.field.localName];
}

/** All members in the default order. */
function slotsOf(m: KvTransferParams): Slot[] {
  const slots: Slot[] = [];
  const rest: Slot[] = [];
  const rawKnown = new Map<string, Slot[]>();
  for (const extra of m.extra) {
    const key = decodeKey(extra.key);
    const slot = { key: extra.key, json: () => extra.json };
    const list = rawKnown.get(key);
    if (!KNOWN.has(key)) rest.push(slot);
    else if (list === undefined) rawKnown.set(key, [slot]);
    else list.push(slot);
  }
  const nulls = new Set(m.nullMembers);
  for (const [key, known] of KNOWN) {
    slots.push(...(rawKnown.get(key) ?? []));
    const value = typedValue(m, known);
    if (value !== undefined) slots.push({ key, json: () => textOf(known.field, value) });
    else if (nulls.has(key)) slots.push({ key, json: () => 'null' });
  }
  for (const key of nulls) {
    if (!KNOWN.has(key)) rest.push({ key: JSON.stringify(key).slice(1, -1), json: () => 'null' });
  }
  return [...slots, ...rest];
}

function reorder(slots: readonly Slot[], order: readonly string[]): Slot[] {
  const waiting = Map.groupBy(slots, (slot) => slot.key);
  const out: Slot[] = [];
  for (const key of order) {
    const slot = waiting.get(key)?.shift();
    if (slot !== undefined) out.push(slot);
  }
  const placed = new Set(out);
  return [...out, ...slots.filter((slot) => !placed.has(slot))];
}

/** Stores the value in its typed field, if that field gives the same text back. */
function setTyped(m: KvTransferParams, known: KnownKey, json: Uint8Array, member: Member): boolean {
  const { field, family } = known;
  if (family !== undefined && m.family.case !== undefined && m.family.case !== family.localName) return false;
  const value = readTyped(field, json, member);
  if (value === undefined) return false;
  if (family === undefined) {
    (m as Fields)[field.localName] = value;
    return true;
  }
  if (family.fieldKind !== 'message') return false;
  if (m.family.case === undefined) {
    m.family = { case: family.localName, value: create(family.message) } as KvTransferParams['family'];
  }
  (m.family.value as unknown as Fields)[field.localName] = value;
  return true;
}

function readTyped(field: DescField, json: Uint8Array, member: Member): unknown {
  // Lists of numbers can be long, and plain digits are their own text, so these two need no comparison.
  if (field.fieldKind === 'message' && field.message === KvBlockIdsSchema) return readBlockIds(json, member);
  const list = field.fieldKind === 'message' ? soleList(field.message) : undefined;
  if (field.fieldKind === 'message' && list?.scalar === ScalarType.UINT32) {
    const ids = readUints(json, member);
    return ids === undefined ? undefined : makeMessage(field.message, { [list.localName]: ids });
  }
  if (member.valueEnd - member.valueStart > MAX_TYPED_OBJECT_BYTES) return undefined;
  if (field.fieldKind === 'scalar') {
    const plain = readPlain(field.scalar, json, member);
    if (plain !== undefined) return plain;
  }
  const text = compact(decoder.decode(json.subarray(member.valueStart, member.valueEnd)));
  const value = fromJson(field, JSON.parse(text));
  return value !== undefined && textOf(field, value) === text ? value : undefined;
}

/** A value that has but one way to be written, and is written so; undefined where it takes more than a look to tell. */
function readPlain(scalar: ScalarType, json: Uint8Array, member: Member): boolean | number | string | undefined {
  const { type, valueStart, valueEnd } = member;
  if (scalar === ScalarType.BOOL) return type === 'true' ? true : type === 'false' ? false : undefined;
  if (scalar === ScalarType.STRING && type === 'string') {
    for (let i = valueStart; i < valueEnd; i++) if (json[i] === 0x5c) return undefined;
    return decodeString(json, member);
  }
  if (scalar !== ScalarType.UINT32 || type !== 'number' || valueEnd - valueStart > 9) return undefined;
  let value = 0;
  for (let i = valueStart; i < valueEnd; i++) {
    const digit = (json[i] ?? 0) - 0x30;
    if (digit < 0 || digit > 9) return undefined;
    value = value * 10 + digit;
  }
  return value;
}

/** The typed value for a JSON value of the right kind; digits, spelling and order are the caller's comparison. */
function fromJson(field: DescField, value: unknown): unknown {
  if (field.fieldKind === 'scalar') return fromScalar(field.scalar, value);
  if (field.fieldKind !== 'message' || typeof value !== 'object' || value === null) return undefined;
  const list = soleList(field.message);
  if (list !== undefined) {
    if (!Array.isArray(value)) return undefined;
    const items = value.map((item: unknown) => fromScalar(list.scalar, item));
    return items.includes(undefined) ? undefined : makeMessage(field.message, { [list.localName]: items });
  }
  const fields: Fields = {};
  for (const inner of field.message.fields) {
    if (!Object.hasOwn(value, inner.name)) continue;
    const typed = fromJson(inner, (value as Fields)[inner.name]);
    if (typed === undefined) return undefined;
    fields[inner.localName] = typed;
  }
  return makeMessage(field.message, fields);
}

function fromScalar(scalar: ScalarType, value: unknown): unknown {
  switch (scalar) {
    case ScalarType.BOOL:
      return typeof value === 'boolean' ? value : undefined;
    case ScalarType.STRING:
      return typeof value === 'string' && value.isWellFormed() ? value : undefined;
    case ScalarType.UINT32:
      return Number.isInteger(value) && Number(value) >= 0 && Number(value) <= UINT32_MAX ? value : undefined;
    default:
      return typeof value === 'number' && Number.isFinite(value) ? value : undefined;
  }
}

function makeMessage(desc: DescMessage, fields: Fields): unknown {
  return Object.assign(create(desc), fields);
}

/** The one repeated scalar of a message that stands for a JSON array. */
function soleList(desc: DescMessage): (DescField & { fieldKind: 'list'; listKind: 'scalar' }) | undefined {
  const field = desc.fields[0];
  return desc.fields.length === 1 && field?.fieldKind === 'list' && field.listKind === 'scalar' ? field : undefined;
}

/** The compact JSON of a typed value. */
function textOf(field: DescField, value: unknown): string {
  if (field.fieldKind !== 'message') return typeof value === 'string' ? JSON.stringify(value) : String(value);
  if (field.message === KvBlockIdsSchema) return blockIdsText(value as KvBlockIds);
  const fields = value as Fields;
  const list = soleList(field.message);
  if (list !== undefined) {
    const items = fields[list.localName] as readonly unknown[];
    return `[${(list.scalar === ScalarType.STRING ? items.map((item) => JSON.stringify(item)) : items).join(',')}]`;
  }
  const members = byNumber(field.message)
    .filter((inner) => fields[inner.localName] !== undefined)
    .map((inner) => `"${inner.name}":${textOf(inner, fields[inner.localName])}`);
  return `{${members.join(',')}}`;
}

function blockIdsText(ids: KvBlockIds): string {
  if (ids.flat.length > 0) return `[${ids.flat.join(',')}]`;
  return `[${ids.groups.map((group) => `[${group.ids.join(',')}]`).join(',')}]`;
}

function readBlockIds(json: Uint8Array, member: Element): KvBlockIds | undefined {
  const elements = scanArray(json, member.valueStart, member.valueEnd);
  if (elements === undefined) return undefined;
  if (elements[0]?.type === 'number') {
    const flat = readUints(json, member);
    return flat === undefined ? undefined : create(KvBlockIdsSchema, { flat });
  }
  const groups: { ids: number[] }[] = [];
  for (const element of elements) {
    const ids = readUints(json, element);
    if (ids === undefined) return undefined;
    groups.push({ ids });
  }
  return create(KvBlockIdsSchema, { groups });
}

/** The numbers of an array that is known to be valid JSON; undefined where one is no uint32 in plain digits. */
function readUints(json: Uint8Array, list: Element): number[] | undefined {
  const ids = list.type === 'array' ? readWholeNumbers(json, list) : undefined;
  return ids === undefined || ids.some((id) => id > UINT32_MAX) ? undefined : ids;
}

/** The JSON text without the white space outside its strings. */
function compact(json: string): string {
  // Engines write little or none, and a look is far cheaper than the replacement.
  if (!/[ \t\r\n]/.test(json)) return json;
  return json.replaceAll(/("(?:[^"\\]|\\.)*")|[ \t\r\n]+/g, (_match, text: string | undefined) => text ?? '');
}
