// The same objects for `import`.
import fs from './fs.js';

export const { FileHandle, appendFile, constants, copyFile, link, lstat, mkdir, open, readFile, readdir, readlink,
  rename, rm, rmdir, stat, symlink, truncate, unlink, writeFile } = fs;
export default fs;
