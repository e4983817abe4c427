/** Resolves once `isSo` is true; the time limit of the test ends it else. */
export async function waitUntil(isSo: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await isSo())) await new Promise((next) => setTimeout(next, 20));
}
