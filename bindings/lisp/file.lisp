;;;; Files: an engine does operations on them, each of which is waited for. Whoever waits can be interrupted.

(in-package #:pelton)

(define-handle engine ()
  "What does operations on files. One thread at a time uses it; make one for each.")

(define-handle file ()
  "An open file. It may be used by any thread at any time, each with an engine of its own, but for its close.")

(defun open-engine (&key threads root)
  "What does operations on files: what the page cache has at once, else by io_uring, or by up to :THREADS threads of its own, 8, where that is
refused. :ROOT a directory that no path leads out of. Does not wait, but for that. Signals OPTION-ERROR, SYSTEM-ERROR."
  (check (with-options (sap (list :threads threads :root root))
           (opening (out %make-engine) (%engine-open sap out)))))

(defmacro with-engine ((engine &rest options) &body body)
  "Runs BODY with an engine: OPEN-ENGINE. It is closed however BODY is left."
  `(with-handle (,engine (open-engine ,@options)) ,@body))

;;; ---- Doing one
;;;
;;; An operation is submitted, and its completion waited for, since a wait in the library could not be interrupted. Who unwinds from it, or lets
;;; the time pass, gives it up, and waits until the kernel has let go of its memory: so that can be a vector of Lisp's, pinned meanwhile.

(defconstant +token+ 1 "That of the one operation in flight.")

(defun failed (errno what name)
  (make-condition 'system-error :code +system+ :errno errno :detail (format nil "~a~@[ ~a~]: ~a" what name (sb-int:strerror errno))))

(defun give-up (engine completion)
  "Ends the operation in flight, and drops what comes of it. Without interrupts, and until it has ended, however long that takes: its memory may be written till then."
  (declare (type word engine) (type system-area-pointer completion))
  (with-words (taken 1)
    (%file-cancel engine +token+)
    ;; The kernel may have no memory to end it for now. Until it has ended, its memory is the kernel's, and its token is in use.
    (loop for code = (%file-completions engine +forever+ completion 1 taken)
          while (or (eql code +again+) (eql code +system+))
          do (%usleep 1000))
    (unless (zerop (sap-ref-64 completion 24))
      (%close (sap-ref-64 completion 24)))))

(defun call-with-operation (engine operation timeout what name finish)
  "Does what is described at OPERATION. Answers what FINISH does, which is called with the SAP of the completion, without interrupts."
  (declare (type engine engine) (type system-area-pointer operation) (type function finish) (dynamic-extent finish))
  (let ((address (handle-address engine)) (in-flight nil) (answer nil) (ended nil))
    (with-words (completion 7)
      (with-words (taken 1)
        (setf (sap-ref-64 operation 0) +token+)
        (flet ((complete (deadline)
                 (without-interrupts
                   (let ((result (attempt (%file-completions address deadline completion 1 taken))))
                     (when (eql result 0)
                       (setf in-flight nil
                             answer (let ((errno (sap-ref-32 completion 12)))
                                      (if (zerop errno) (funcall finish completion) (failed errno what name)))))
                     result)))
               (submit ()
                 (without-interrupts
                   (let ((result (attempt (%file-submit address operation 1 taken))))
                     ;; Also if it cannot be begun yet.
                     (setf in-flight (eql (sap-ref-64 taken 0) 1))
                     result)))
               (arm () (attempt (%arm address))))
          (without-interrupts
            (unwind-protect
                 (with-pinned-objects (engine)
                   (with-local-interrupts
                     (let ((submitted (submit)))
                       (unless in-flight (check submitted)))
                     (persisting ()
                       (wait-for address nil timeout #'complete #'arm)))
                   (setf ended t))
              (when in-flight (give-up address completion))
              ;; Opened, and an interrupt keeps it from who wanted it.
              (when (and (not ended) (typep answer 'handle)) (close-quietly answer))))
          (check answer))))))

(defmacro operating ((engine kind &key file timeout name) (&rest fields) (completion &body body))
  "Does the operation of that KIND, on an open FILE perhaps, whose words are FIELDS, (offset bytes value). Answers what BODY does, where the SAP
COMPLETION is what came of it. Without interrupts."
  (let ((operation (gensym "OPERATION")) (on (gensym "FILE")))
    `(let ((,on ,file))
       (with-pinned-objects (,on)
         (with-words (,operation 19)
           (setf (sap-ref-32 ,operation 8) ,kind
                 ,@(when file `((sap-ref-64 ,operation 16) (handle-address ,on)))
                 ,@(loop for (offset bytes value) in fields
                         append `((,(ecase bytes (4 'sap-ref-32) (8 'sap-ref-64)) ,operation ,offset) ,value)))
           (call-with-operation ,engine ,operation ,timeout
                                ,(if (symbolp kind) (substitute #\Space #\- (string-downcase kind)) "looking at") ,name
                                (lambda (,completion) (declare (ignorable ,completion)) ,@body)))))))

(defmacro with-path ((word path) &body body)
  "Runs BODY with WORD, where the name of PATH is for C."
  (let ((octets (gensym "OCTETS")))
    `(let ((,octets (coerce (sb-ext:string-to-octets (native ,path) :external-format :utf-8 :null-terminate t) 'octets)))
       (with-pinned-objects (,octets)
         (let ((,word (sap-int (vector-sap ,octets)))) ,@body)))))

(defmacro define-kinds (&rest kinds)
  `(progn ,@(loop for (name number) on kinds by #'cddr collect `(defconstant ,name ,number))))

;; pelton_file_operation.
(define-kinds opening-file 1 reading 3 writing 4 syncing 5 syncing-data 6 truncating 7 allocating 8 looking-at 9 looking-at-link 10 unlinking 12
  removing-directory 13 renaming 14 linking 15 making-directory 18 listing 19)

;;; ---- What can be done

(defconstant +end+ (- (expt 2 64) 2) "Where a file ends by then.")

(defun place (offset)
  (etypecase offset
    (null (1- (expt 2 64)))
    ((eql :end) +end+)
    ((unsigned-byte 62) offset)))

(defun open-file (engine path &key (direction :input) create exclusive truncate directory (mode #o666) timeout)
  "Opens a file. :DIRECTION is :INPUT, :OUTPUT or :IO; :CREATE true makes it if it is not there, with the permissions of :MODE less the umask,
:EXCLUSIVE only so; :TRUNCATE true empties it; :DIRECTORY true: for LIST-DIRECTORY. All of these wait, up to TIMEOUT seconds, nil for ever, and can
be interrupted: then what was asked for may be done, or not. Signals SYSTEM-ERROR, whose SYSTEM-ERROR-ERRNO is the system's, and TIMED-OUT with the
restart WAIT-LONGER."
  (check-library)
  (with-path (name path)
    (operating (engine opening-file :timeout timeout :name path)
        ((32 8 name)
         (88 4 (logior (ecase direction (:input 0) (:output 1) (:io 2))
                       (if create #o100 0) (if exclusive #o300 0) (if truncate #o1000 0) (if directory #o200000 0)))
         (92 4 mode))
        (completion (adopt (%make-file :address (sap-ref-64 completion 24)))))))

(defmacro with-file ((file engine path &rest options) &body body)
  "Runs BODY with an open file: OPEN-FILE. It is closed however BODY is left."
  `(with-handle (,file (open-file ,engine ,path ,@options)) ,@body))

(defun transfer (engine kind file octets start end offset timeout what)
  (declare (type engine engine) (type file file))
  (with-octets-at (sap size) (octets start end)
    (with-pinned-objects (file)
      (with-words (memory 2)
        (setf (sap-ref-sap memory 0) sap
              (sap-ref-64 memory 8) size)
        (with-words (operation 19)
          (setf (sap-ref-32 operation 8) kind
                (sap-ref-64 operation 16) (handle-address file)
                (sap-ref-sap operation 48) memory
                (sap-ref-64 operation 56) 1
                (sap-ref-64 operation 64) (place offset))
          (call-with-operation engine operation timeout what nil
                               (lambda (completion) (sap-ref-64 completion 16))))))))

(defun read-file (engine file octets &key (start 0) end offset timeout)
  "Reads into OCTETS, from START to END, nil for its end, what the file has from OFFSET on, nil for its own position, which moves. Answers how many
bytes: fewer where the file ends. Waits, and signals, as OPEN-FILE."
  (transfer engine reading file octets start end offset timeout "reading"))

(defun write-file (engine file octets &key (start 0) end offset timeout)
  "Writes the bytes of OCTETS from START to END, nil for its end, at OFFSET, nil for the file's own position, which moves, :END for its end.
Answers how many: all of them. Waits, and signals, as OPEN-FILE."
  (transfer engine writing file octets start end offset timeout "writing"))

(defun sync-file (engine file &key data timeout)
  "Has what was written to the file on the disk, and what is known of it too, unless :DATA is true. Waits, and signals, as OPEN-FILE."
  (operating (engine (if data syncing-data syncing) :file file :timeout timeout) () (completion t)))

(defun truncate-file (engine file size &key timeout)
  "Makes the file SIZE bytes long. Waits, and signals, as OPEN-FILE."
  (operating (engine truncating :file file :timeout timeout) ((80 8 size)) (completion t)))

(defun allocate-file (engine file offset size &key timeout)
  "Has disk for SIZE bytes from OFFSET on. Waits, and signals, as OPEN-FILE."
  (operating (engine allocating :file file :timeout timeout) ((64 8 offset) (80 8 size)) (completion t)))

(defun kind-of-file (number)
  (nth number '(:unknown :regular :directory :symbolic-link :fifo :socket :character-device :block-device)))

(defun status-at (sap)
  (list :kind (kind-of-file (sap-ref-32 sap 0)) :mode (sap-ref-32 sap 4) :bytes (sap-ref-64 sap 8) :allocated-bytes (sap-ref-64 sap 16)
        :links (sap-ref-64 sap 24) :uid (sap-ref-32 sap 32) :gid (sap-ref-32 sap 36) :device-major (sap-ref-32 sap 40)
        :device-minor (sap-ref-32 sap 44) :inode (sap-ref-64 sap 48) :accessed-ns (signed-sap-ref-64 sap 56)
        :modified-ns (signed-sap-ref-64 sap 64) :changed-ns (signed-sap-ref-64 sap 72) :created-ns (signed-sap-ref-64 sap 80)))

(defun file-status (engine file-or-path &key link timeout)
  "What is known of a file, or of what a path leads to, with :LINK true of a symbolic link itself: a property list. Times are in nanoseconds since
1970. Waits, and signals, as OPEN-FILE."
  (if (typep file-or-path 'file)
      (operating (engine looking-at :file file-or-path :timeout timeout) ()
          (completion (status-at (sap-ref-sap completion 32))))
      (with-path (name file-or-path)
        (operating (engine (if link looking-at-link looking-at) :timeout timeout :name file-or-path) ((32 8 name))
            (completion (status-at (sap-ref-sap completion 32)))))))

(defun entries-at (sap size)
  "For each entry its inode, a word; its kind, a byte; its name, and a 0."
  (let ((text (sap-octets sap size)))
    (loop with at = 0
          while (<= (+ at 10) size)
          collect (let ((end (position 0 text :start (+ at 9))))
                    (prog1 (cons (sb-ext:octets-to-string text :start (+ at 9) :end end :external-format :utf-8)
                                 (kind-of-file (aref text (+ at 8))))
                      (setf at (1+ end)))))))

(defun list-directory (engine path &key timeout)
  "What is in a directory, but for . and ..: a list of (NAME . KIND), where KIND is as of FILE-STATUS, as far as the directory says. Waits, for some
hundreds of them up to TIMEOUT seconds, and signals, as OPEN-FILE."
  (with-file (directory engine path :directory t :timeout timeout)
    (loop for entries = (operating (engine listing :file directory :timeout timeout :name path) ()
                            (completion (entries-at (sap-ref-sap completion 40) (ldb (byte 62 0) (sap-ref-64 completion 48)))))
          while entries
          append entries)))

(defmacro define-path-operation (name kind (&rest more) documentation)
  `(defun ,name (engine path ,@(mapcar #'first more) &key timeout)
     ,documentation
     (with-path (name path)
       ,(if (equal more '((to)))
            `(with-path (other to)
               (operating (engine ,kind :timeout timeout :name path) ((32 8 name) (40 8 other)) (completion t)))
            `(operating (engine ,kind :timeout timeout :name path) ((32 8 name) ,@(loop for (mode) in more collect `(92 4 ,mode)))
                 (completion t))))))

(define-path-operation unlink-file unlinking () "Removes a file, which is no directory. Waits, and signals, as OPEN-FILE.")
(define-path-operation remove-directory removing-directory () "Removes an empty directory. Waits, and signals, as OPEN-FILE.")
(define-path-operation make-directory making-directory ((mode))
  "Makes a directory with the permissions of MODE, #o777, less the umask. Waits, and signals, as OPEN-FILE.")
(define-path-operation rename-file renaming ((to)) "Gives a file another name, which replaces what has that. Waits, and signals, as OPEN-FILE.")
(define-path-operation link-file linking ((to)) "Gives a file a second name. Waits, and signals, as OPEN-FILE.")

(defun read-file-octets (engine path &key timeout)
  "A fresh vector of all that a file has. Waits, for each operation up to TIMEOUT seconds, and signals, as OPEN-FILE."
  (with-file (file engine path :timeout timeout)
    (let ((parts '()) (offset 0) (size (max 4096 (getf (file-status engine file :timeout timeout) :bytes))))
      (loop
        (let* ((octets (make-octets size)) (read (read-file engine file octets :offset offset :timeout timeout)))
          (push (if (= read size) octets (subseq octets 0 read)) parts)
          (incf offset read)
          ;; It may have grown meanwhile.
          (when (< read size)
            (return (if (rest parts) (joined (nreverse parts)) (first parts)))))))))

(defun write-file-octets (engine path octets &key (mode #o666) sync timeout)
  "Has a file of that path consist of OCTETS, a vector of bytes; :SYNC true: on the disk, too. Waits, for each operation up to TIMEOUT seconds, and
signals, as OPEN-FILE; then the file may have some of them."
  (with-file (file engine path :direction :output :create t :truncate t :mode mode :timeout timeout)
    (write-file engine file octets :offset 0 :timeout timeout)
    (when sync (sync-file engine file :timeout timeout)))
  (values))
