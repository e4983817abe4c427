/** A parsed JSON object whose members are not trusted. */
export type JsonObject = Readonly<Record<string, unknown>>;

/** True for objects that are neither null nor arrays. */
export function isObject(value: unknown): value is JsonObject {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** True if Python would treat the JSON value as true. */
export function isTruthy(value: unknown): boolean {
  if (Array.isArray(value)) return value.length > 0;
  if (isObject(value)) return Object.keys(value).length > 0;
  return Boolean(value);
}

/** True for an integer that is exact as a number. */
export function isInteger(value: unknown): value is number {
  return typeof value === 'number' && Number.isSafeInteger(value);
}
