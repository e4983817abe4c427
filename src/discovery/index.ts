import { dnsSource } from './dns.ts';
import { fileSource } from './file.ts';
import { kubernetesSource } from './kubernetes.ts';
import type { MakeSource } from './source.ts';
import { staticSource } from './static.ts';

/** Every source of instances. */
export const SOURCES: readonly MakeSource[] = [staticSource, fileSource, dnsSource, kubernetesSource];
