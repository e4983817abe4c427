/** A member of what JSON said; undefined where it is absent or null, or where the value is no object. */
export function memberOf(value: unknown, key: string): unknown {
  if (typeof value !== 'object' || value === null || !Object.hasOwn(value, key)) return undefined;
  const found: unknown = Reflect.get(value, key);
  return found ?? undefined;
}

/** A text member; undefined where it is none. */
export function textOf(value: unknown, key: string): string | undefined {
  const found = memberOf(value, key);
  return typeof found === 'string' ? found : undefined;
}

/** A number member; undefined where it is none. */
export function numberOf(value: unknown, key: string): number | undefined {
  const found = memberOf(value, key);
  return typeof found === 'number' ? found : undefined;
}
