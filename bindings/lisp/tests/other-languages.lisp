;;;; With other languages: Rust, by the pelton command, PELTON_TOOL; C, by programs in the directory PELTON_C; Go, by
;;;; PELTON_GO, which is unset if Go is missing: run-tests reports that. Also with a malloc that refuses.

(in-package #:pelton-tests)

(defun tool (arguments &key input (wait t))
  "Runs the pelton command; returns its output, or its process."
  (let ((tool (or (sb-posix:getenv "PELTON_TOOL")
                  (error "PELTON_TOOL must name the pelton command: bindings/lisp/run-tests does"))))
    (if wait
        (with-output-to-string (out)
          (let ((process (sb-ext:run-program tool arguments :output out :error out
                                                            :input (and input (make-string-input-stream input)))))
            (unless (eql 0 (sb-ext:process-exit-code process))
              (error "pelton ~{~a~^ ~} has ended with ~d: ~a" arguments (sb-ext:process-exit-code process)
                     (get-output-stream-string out)))))
        (sb-ext:run-program tool arguments :output nil :error nil :wait nil))))

(deftest rust-sends-and-lisp-receives
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread (tool (list "send" name) :input (format nil "one~%two~%three~%"))))
         (received '()))
    (pelton:with-receiver (receiver name :accept t :timeout *limit*)
      (pelton:do-messages (octets receiver :timeout *limit*) (push (text octets) received)))
    (joined thread)
    (is (equal (mapcar (lambda (line) (string-right-trim '(#\Newline) line)) (reverse received))
               '("one" "two" "three")))))

(deftest lisp-sends-and-rust-receives
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread (tool (list "recv" name)))))
    (pelton:with-sender (sender name :timeout *limit*)
      (dotimes (i 1000) (pelton:send sender (bytes (format nil "line ~d" i)) :timeout *limit*))
      (pelton:wait-released sender :timeout *limit*))
    (let ((lines (joined thread)))
      (is (eql 1000 (count #\Newline lines)))
      (is (eql 0 (search (format nil "line 0~%line 1~%") lines))))))

(deftest by-a-path-from-lisp-to-rust-and-to-a-record-file
  (let ((name (format nil "path:~a" (in-directory "channel"))) (read '()))
    (pelton:with-sender (sender name :create t)
      (dotimes (i 100) (pelton:send sender (bytes (princ-to-string i)))))
    (tool (list "flush" name (in-directory "log")))
    (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (push (text octets) read)) (in-directory "log"))
    (is (equal (reverse read) (loop for i below 100 collect (princ-to-string i))))))

(deftest rust-reads-a-record-file-of-lisp
  (let ((path (in-directory "log")))
    (pelton:with-appenders (appenders (pelton:record-file path))
      (dotimes (i 1000) (pelton:append-message appenders (bytes (format nil "~d" i)))))
    (is (equal (tool (list "cat" path)) (format nil "~{~d~%~}" (loop for i below 1000 collect i))))))

(deftest rust-calls-lisp
  (with-serving ((service-name "s") (lambda (request) (bytes (string-upcase (text (pelton:request-octets request))))))
    (is (search "LOUDER" (tool (list "call" (service-name "s") "louder"))))))

(deftest lisp-calls-rust
  (let ((process (tool (list "serve" (service-name "s") "--exec" "wc -w") :wait nil)))
    (unwind-protect
         (pelton:with-client (client (service-name "s") :timeout *limit*)
           (is (eql 3 (parse-integer (text (pelton:call client (bytes "three small words") :timeout *limit*))
                                     :junk-allowed t))))
      (sb-ext:process-kill process sb-posix:sigterm)
      (sb-ext:process-wait process))))

(deftest a-killed-sender-is-signalled-and-its-successor-continues
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (pelton:with-receiver (receiver name :create t)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name) :input :stream :output nil
                                         :error nil
                                                                                            :wait nil)))
        (format (sb-ext:process-input process) "before~%")
        (finish-output (sb-ext:process-input process))
        (is (search "before" (text (pelton:receive receiver :timeout *limit*))))
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process)
        (signals pelton:peer-died-error (pelton:receive receiver :timeout *limit*)))
      (pelton:with-sender (sender name) (pelton:send sender (bytes "after")))
      (is (equal (text (pelton:receive receiver :timeout *limit*)) "after")))))

(deftest an-end-that-the-library-reports-once-survives-an-interrupt
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (pelton:with-receiver (receiver name :create t)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name) :input :stream :output nil
                                         :error nil
                                                                                            :wait nil)))
        (format (sb-ext:process-input process) "before~%")
        (finish-output (sb-ext:process-input process))
        (is (search "before" (text (pelton:receive receiver :timeout *limit*))))
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process)
        (with-an-interrupt-pending (pelton:receive receiver :timeout *limit*))
        (signals pelton:peer-died-error (pelton:receive receiver :timeout *limit*))
        (signals pelton:timed-out (pelton:receive receiver :timeout 0))))))

(deftest the-restart-resume-channel-receives-from-the-successor
  (let ((name (format nil "unix:~a" (in-directory "socket"))) (processes '()))
    (flet ((sending (line)
             (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name)
                                                :input :stream :output nil :error nil
                                                                                                   :wait nil)))
               (format (sb-ext:process-input process) "~a~%" line)
               (finish-output (sb-ext:process-input process))
               (push process processes)
               process))
           (kill (process)
             (sb-ext:process-kill process sb-posix:sigkill)
             (sb-ext:process-wait process)))
      (unwind-protect
           (let ((opening (in-thread (pelton:open-receiver name :accept t :timeout *limit*))))
             (until (probe-file (in-directory "socket")))
             (let* ((first (sending "before")) (receiver (joined opening)) (died 0))
               (is (search "before" (text (pelton:receive receiver :timeout *limit*))))
               (kill first)
               (is (search "after" (text (handler-bind ((pelton:peer-died-error
                                                          (lambda (condition)
                                                            (incf died)
                                                            (sending "after")
                                                            (pelton:resume-channel condition))))
                                           (pelton:receive receiver :timeout *limit*)))))
               (is (eql died 1))
               (kill (first processes))
               (signals pelton:peer-died-error (pelton:receive receiver :timeout *limit*))
               (signals pelton:timed-out (pelton:resume receiver :timeout 0.02))
               (sending "again")
               (pelton:resume receiver :timeout *limit*)
               (is (search "again" (text (pelton:receive receiver :timeout *limit*))))
               (pelton:close-handle receiver)))
        (dolist (process processes)
          (when (sb-ext:process-alive-p process) (kill process)))))))

(deftest a-killed-publisher-leaves-a-set-and-resume-channel-joins-its-successor
  (let ((name (format nil "path:~a" (in-directory "members"))) (processes '()) (died 0))
    (flet ((publishing (line)
             (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "pub" name)
                                                :input :stream :output nil :error nil :wait nil)))
               (format (sb-ext:process-input process) "~a~%" line)
               (finish-output (sb-ext:process-input process))
               (push process processes)))
           (kill ()
             (sb-ext:process-kill (first processes) sb-posix:sigkill)
             (sb-ext:process-wait (first processes))))
      (unwind-protect
           (pelton:with-subscriber-set (set)
             (publishing "before")
             (pelton:with-subscriber (subscriber name :timeout *limit* :start-from :oldest)
               (pelton:add-subscriber set subscriber)
               (is (search "before" (text (pelton:receive-from-set set :timeout *limit*))))
               (kill)
               (with-an-interrupt-pending (pelton:receive-from-set set :timeout *limit*))
               (multiple-value-bind (octets from)
                   (handler-bind ((pelton:peer-died-error
                                    (lambda (condition)
                                      (incf died)
                                      (is (eq subscriber (pelton:pelton-error-subscriber condition)))
                                      (publishing "after")
                                      (pelton:resume-channel condition))))
                     (pelton:receive-from-set set :timeout *limit*))
                 (is (search "after" (text octets)))
                 (is (eq subscriber from)))
               (is (eql died 1))
               (kill)
               (let ((left (handler-case (pelton:receive-from-set set :timeout *limit*)
                             (pelton:peer-died-error (condition) (pelton:pelton-error-subscriber condition)))))
                 (is (eq subscriber left)))
               (is (null (pelton:receive-from-set set)))))
        (dolist (process processes)
          (when (sb-ext:process-alive-p process) (sb-ext:process-kill process sb-posix:sigkill)))))))

(deftest a-killed-receiver-is-signalled-once
  (let ((name (format nil "path:~a" (in-directory "channel"))) (signalled 0))
    (pelton:with-sender (sender name :create t :capacity 65536)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "recv" name) :input nil :output nil
                                         :error nil :wait nil)))
        (pelton:send sender (bytes "before"))
        (pelton:wait-released sender :timeout *limit*)
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process))
      (loop for end = (handler-case (progn (pelton:send sender (number-octets 1) :timeout 0.05) nil)
                        (pelton:peer-died-error () (incf signalled) nil)
                        (pelton:timed-out () t))
            until end)
      (is (eql signalled 1)))))

(defun all-comes-back (program)
  "Sends messages to PROGRAM, which sends them back."
  (let* ((there (format nil "unix:~a" (in-directory "there"))) (back (format nil "unix:~a" (in-directory "back")))
         (messages (loop for i below 500 collect (make-array (mod (* i i) 3000) :element-type '(unsigned-byte 8)
                                                                                :initial-element (mod i 256))))
         (receiving (in-thread
                      (pelton:with-receiver (receiver back :accept t :timeout *limit*)
                        (let ((received '()))
                          (pelton:do-messages (octets receiver :timeout *limit*) (push octets received))
                          (nreverse received))))))
    (until (probe-file (in-directory "back")))
    (let ((process (sb-ext:run-program program (list there back) :wait nil :output nil :error nil)))
      (unwind-protect
           (progn
             (pelton:with-sender (sender there :timeout *limit*)
               (dolist (message messages) (pelton:send sender message :timeout *limit*)))
             (is (equalp (joined receiving) messages))
             (sb-ext:process-wait process)
             (is (eql 0 (sb-ext:process-exit-code process))))
        (when (sb-ext:process-alive-p process) (sb-ext:process-kill process sb-posix:sigkill))))))

(defun c-program (name)
  (format nil "~a/~a" (or (sb-posix:getenv "PELTON_C")
                            (error "PELTON_C must name a directory: bindings/lisp/run-tests does")) name))

(deftest c-sends-back-what-lisp-sends
  (all-comes-back (c-program "peer")))

(deftest go-sends-back-what-lisp-sends
  (let ((program (sb-posix:getenv "PELTON_GO")))
    (when program (all-comes-back program))))

(deftest c-and-lisp-call-one-another
  (with-serving ((service-name "s") (lambda (request) (bytes (string-upcase (text (pelton:request-octets request))))))
    (is (search "ASKED" (with-output-to-string (out)
                          (sb-ext:run-program (c-program "call") (list "ask" (service-name "s") "asked") :output out
                                              :error out)))))
  (let ((process (sb-ext:run-program (c-program "call") (list "serve" (service-name "c")) :wait nil :output nil
                                     :error nil)))
    (unwind-protect
         (pelton:with-client (client (service-name "c") :timeout *limit*)
           (is (equal (text (pelton:call client (bytes "echo") :timeout *limit*)) "echo")))
      (sb-ext:process-kill process sb-posix:sigkill)
      (sb-ext:process-wait process))))

(deftest c-and-lisp-read-one-anothers-record-files
  (let ((ours (in-directory "ours")) (theirs (in-directory "theirs")) (read 0))
    (pelton:with-appenders (appenders (pelton:record-file ours))
      (pelton:append-message appenders (bytes "a line of Lisp's")))
    (is (search "a line of Lisp's" (with-output-to-string (out)
                                     (sb-ext:run-program (c-program "append") (list ours) :output out :error out))))
    (sb-ext:run-program (c-program "append") (list theirs "2" "100"))
    (is (eq :end (pelton:map-record-file (lambda (octets seq) (declare (ignore seq))
                                                 (when (search "line" (text octets)) (incf read)))
                                         theirs)))
    (is (eql read 200))))

(deftest an-operation-cancelled-without-memory-leaves-nothing-to-the-next
  (let ((refuse (sb-sys:find-foreign-symbol-address "no_memory_for"))) ; run-tests preloads it
    (is refuse)
    (pelton:with-engine (engine)
      (let ((path (in-directory "there")))
        (pelton:write-file-octets engine path (bytes "some"))
        ;; Starting it, waiting for it, and each attempt to cancel it. Without io_uring nothing is refused.
        (sb-alien:alien-funcall (sb-alien:sap-alien (sb-sys:int-sap refuse) (function sb-alien:void sb-alien:int)) 5)
        (handler-case (is (eql 4 (getf (pelton:file-status engine path) :bytes)))
          (pelton:system-error (condition) (is (search "beginning operations" (princ-to-string condition)))))
        (sb-alien:alien-funcall (sb-alien:sap-alien (sb-sys:int-sap refuse) (function sb-alien:void sb-alien:int)) 0)
        (is (eql 2 (pelton:system-error-errno (signals pelton:system-error
                                                       (pelton:file-status engine (in-directory "missing")))))) ; ENOENT
        (is (eql 4 (getf (pelton:file-status engine path) :bytes)))))))
