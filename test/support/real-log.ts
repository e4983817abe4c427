import { appendFileSync, existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { cpus, totalmem } from 'node:os';
import { dirname } from 'node:path';

/** Collects what a run against real engines saw; BATON_REAL_LOG names the file it is appended to. */
export class RealLog {
  readonly #title: string;
  readonly #lines: string[] = [];

  constructor(title: string) {
    this.#title = title;
  }

  push(line: string): void {
    this.#lines.push(line);
  }

  /** Appends the section; a new file begins with the machine. */
  write(): void {
    const file = process.env['BATON_REAL_LOG'];
    if (file === undefined || this.#lines.length === 0) return;
    mkdirSync(dirname(file), { recursive: true });
    if (!existsSync(file)) {
      const machine = `${cpus().length} cores (${cpus()[0]?.model.trim()}), ${Math.round(totalmem() / 2 ** 30)} GiB`;
      writeFileSync(file, `# A run against real engines\n\nWritten by \`npm run test:real\` on ${machine}.\n`);
    }
    appendFileSync(file, `\n## ${this.#title}\n\n${this.#lines.map((line) => `- ${line}\n`).join('')}`);
  }
}
