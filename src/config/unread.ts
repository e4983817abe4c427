const REASONS: ReadonlyMap<string, string> = new Map([
  ['ENOENT', 'does not exist'],
  ['EISDIR', 'is a directory'],
  ['ENOTDIR', 'does not exist'],
  ['EACCES', 'cannot be read: permission denied'],
]);

/** Why a file cannot be read, as the end of a sentence that begins with its name. */
export function whyUnread(error: unknown): string {
  const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
  return REASONS.get(code) ?? `cannot be read (${code})`;
}
