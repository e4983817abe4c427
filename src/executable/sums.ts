/**
 * The parts of the executable and their CRC-32 sums. A checkout and a package have none; `scripts/executable.mjs` puts
 * others in the place of this file when it builds one.
 */
export const SUMS: Readonly<Record<string, number>> = {};

/** The scripts of the program, in the order in which they are wanted, and the module that it begins with. */
export const PROGRAM: { readonly first: string; readonly scripts: readonly string[] } = { first: '', scripts: [] };
