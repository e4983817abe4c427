import { readFile } from 'node:fs/promises';
import { ApiError, badRequest, schemaError, toPython } from './api-error.ts';
import { hashText, toHex } from './hash.ts';
import { isObject } from './json.ts';
import type { ServedModel } from './options.ts';

/** Routes by which adapters come and go while an engine runs; they are there only where that is allowed. */
export const ADAPTER_ROUTES: Readonly<Record<string, (models: readonly ServedModel[], body: unknown) => Change>> = {
  '/v1/load_lora_adapter': load,
  '/v1/unload_lora_adapter': unload,
};

/** What is served after the call, and what it answers. */
type Change = Promise<{ readonly models: readonly ServedModel[]; readonly said: string }>;

/** An adapter's weights are the content of its file; under one name they may be replaced. */
async function load(models: readonly ServedModel[], body: unknown): Change {
  const name = textOf(body, 'lora_name');
  const path = textOf(body, 'lora_path');
  const inPlace = isObject(body) && body['load_inplace'] === true;
  const known = models.find(({ id }) => id === name);
  if (known !== undefined && !inPlace) {
    throw badRequest(
      `The lora adapter '${name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.`,
    );
  }
  const content = await readFile(path, 'utf8').catch(() => {
    throw new ApiError(404, `Loading lora ${name} failed: No adapter found for ${path}`, 'NotFoundError', null);
  });
  const base = models.find(({ parent }) => parent === null)?.id ?? '';
  const adapter = { id: name, root: path, parent: base, weights: toHex(hashText(`${path} ${content}`)) };
  return {
    models: [...models.filter((model) => model !== known), adapter],
    said: `Success: LoRA adapter '${name}' added successfully.`,
  };
}

async function unload(models: readonly ServedModel[], body: unknown): Change {
  const name = textOf(body, 'lora_name');
  if (!models.some(({ id, parent }) => id === name && parent !== null)) {
    throw new ApiError(404, `The lora adapter '${name}' cannot be found.`, 'NotFoundError', null);
  }
  return {
    models: models.filter(({ id }) => id !== name),
    said: `Success: LoRA adapter '${name}' removed successfully.`,
  };
}

function textOf(body: unknown, member: string): string {
  const text = isObject(body) ? body[member] : undefined;
  if (typeof text === 'string' && text !== '') return text;
  throw schemaError('missing', `body.${member}`, 'Field required', toPython(body));
}
