import { readFile } from 'node:fs/promises';
import { whyUnread } from '../config/unread.ts';
import { pause } from '../services/pause.ts';

/** What a file holds, or why it cannot be read, as {@link whyUnread} says it. */
export type FileText =
  | { readonly kind: 'text'; readonly text: string }
  | { readonly kind: 'error'; readonly why: string };

/** Between two looks at a file, milliseconds. */
const LOOK_MS = 500;

/**
 * Looks at a file again and again, and tells what it holds: at once, and whenever that has changed. The text is compared and
 * not its times, so that it does not matter how the file is replaced: by a write, by a rename, or by the swap of a link above
 * it as Kubernetes does for a ConfigMap. A change counts when it is seen twice: the first time it may be half written.
 */
export async function watchText(
  file: string,
  tell: (now: FileText) => void,
  signal: AbortSignal,
  lookMs = LOOK_MS,
): Promise<void> {
  let told: FileText | undefined;
  let seen: FileText | undefined;
  while (!signal.aborted) {
    const now = await look(file);
    const isWhole = told === undefined || isSame(now, seen);
    if (isWhole && !isSame(now, told)) {
      told = now;
      tell(now);
    }
    seen = now;
    await pause(lookMs, signal);
  }
}

async function look(file: string): Promise<FileText> {
  try {
    return { kind: 'text', text: await readFile(file, 'utf8') };
  } catch (error) {
    return { kind: 'error', why: whyUnread(error) };
  }
}

function isSame(a: FileText, b: FileText | undefined): boolean {
  return a.kind === 'text' ? b?.kind === 'text' && a.text === b.text : b?.kind === 'error' && a.why === b.why;
}
